# SPDX-License-Identifier: Apache-2.0
"""The front end of an engine without consumers: a null object."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.selectors import fail
from vllm.v1.readouts.errors import fail as readout_error

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager


class NoCapture:
    """Refuses requests that ask for captures or readouts; otherwise does nothing."""

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        resumable: bool = False,
    ) -> None:
        """Refuse a request that asks for captures or readouts.

        Raises:
            CaptureValidationError: it does; the message names the option to start with.

        """
        for name in ("readouts", "stop_when"):
            if getattr(params, name) is not None:
                raise readout_error(
                    f"{name}: this server reads nothing out; start it with "
                    "--enable-readouts, or LLM(enable_readouts=True) offline",
                    name,
                    getattr(params, name),
                )
        if params.capture == {}:
            params.capture = None  # Asks for nothing.
        if params.capture is not None:
            raise fail(
                "capture: this server has no capture consumers; start it with "
                "--capture-consumers NAME, or LLM(capture_consumers=[...]) offline",
                "capture",
                params.capture,
            )

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        """Nothing is tracked."""

    def end_request(self, state: "RequestState", finish_reason: str) -> None:
        """Nothing is tracked."""

    def refused(self, output: "RequestOutput") -> None:
        """Nothing is tracked."""

    def flush(self) -> None:
        """Nothing is sent."""

    def note_results(self, outputs: Sequence["RequestOutput"]) -> None:
        """There are none."""

    def wait(self, outputs: Collection["RequestOutput"]) -> None:
        """There is nothing to wait for."""

    def take_finished(self) -> list[Any]:
        """No request had to end before its list was complete."""
        return []

    def drop_finished(self, request_ids: Collection[str]) -> None:
        """There are none."""

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """There are no metrics."""

    async def listen(self, core: Any) -> None:
        """There is nothing to hear."""

    def describe(self) -> dict[str, Any]:
        """Consumers, limits and counters, as plain data."""
        return {"consumers": [], "limits": {}, "hook_points": {}, "counters": {}}

    def settle(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


NO_CAPTURE = NoCapture()
