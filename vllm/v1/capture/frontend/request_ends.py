# SPDX-License-Identifier: Apache-2.0
"""The ends of requests, on their way from the front end to the engine."""

from typing import TYPE_CHECKING, Protocol

from vllm.v1.capture.plan import CaptureEnd

if TYPE_CHECKING:
    from vllm.v1.capture.frontend.tracking import Sample
    from vllm.v1.engine.output_processor import RequestState

SETTLE_SECONDS = 2.0
"""An engine that is about to stop has so long to take what was sent to it."""


class EndsSender(Protocol):
    """Gives an engine the ends of requests."""

    def __call__(self, ends: list[CaptureEnd]) -> None:
        """Send them, now or soon."""

    def wait(self, timeout: float) -> None:
        """Until all that were sent have arrived, `timeout` seconds at most."""


class Ends:
    """Notes ends and sends them together."""

    def __init__(self, send: EndsSender, reply_to: str) -> None:
        """Note nothing yet.

        Args:
            send: takes what was noted.
            reply_to: where the results go.

        """
        self._send = send
        self._reply_to = reply_to
        self._noted: list[CaptureEnd] = []

    def note(self, state: "RequestState", sample: "Sample", finish_reason: str) -> None:
        """A sample has ended with the tokens that its client has."""
        assert state.detokenizer is not None
        self._noted.append(
            CaptureEnd(
                request_id=state.request_id,
                reply_to=self._reply_to,
                token_ids=list(state.detokenizer.output_token_ids),
                sample_index=state.request_index,
                finish_reason=finish_reason,
                instances=list(sample.instances),
            )
        )

    def flush(self) -> None:
        """Send what was noted."""
        if self._noted:
            ends, self._noted = self._noted, []
            self._send(ends)

    def settle(self) -> None:
        """Wait until the engine has what was sent."""
        self._send.wait(SETTLE_SECONDS)
