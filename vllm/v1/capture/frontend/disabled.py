# SPDX-License-Identifier: Apache-2.0
"""The front end of an engine without consumers: a null object."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.errors import check_fields, fail

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.capture.types import CaptureResult
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager


class NoCapture:
    """Refuses requests that ask for captures; otherwise does nothing.

    The methods are described at its subclass `CaptureFrontend`.
    """

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        resumable: bool = False,
    ) -> None:
        """Refuse a request that asks for captures.

        Raises:
            CaptureValidationError: it does; the message names the option to start with.

        """
        check_fields(params)
        if params.capture is not None:
            raise fail(
                "capture: this server has no capture consumers; start it with "
                "--capture-consumers NAME, or LLM(capture_consumers=[...]) offline",
                "capture",
                params.capture,
            )

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        pass

    def end_request(self, state: "RequestState", finish_reason: str) -> None:
        pass

    def refused(self, output: "RequestOutput") -> None:
        pass

    def flush(self) -> None:
        pass

    def note_results(self, outputs: Sequence["RequestOutput"]) -> None:
        pass

    async def complete(self, output: "RequestOutput", params: "SamplingParams") -> None:
        pass

    async def wait_for_results(
        self, client_id: str, timeout: float | None
    ) -> "dict[str, CaptureResult] | None":
        return None

    def wait(self, outputs: Collection["RequestOutput"]) -> None:
        pass

    def publish(self, manager: "StatLoggerManager | None") -> None:
        pass

    async def listen(self, core: Any) -> None:
        pass

    def consumers(self) -> Mapping[str, Any]:
        """The instances here, by name; there are none."""
        return {}

    def describe(self) -> dict[str, Any]:
        return {"consumers": [], "limits": {}, "hook_points": {}, "counters": {}}

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_CAPTURE = NoCapture()
