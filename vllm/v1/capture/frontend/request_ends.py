# SPDX-License-Identifier: Apache-2.0
"""Collects the ends of requests in the front end and sends them to the engine."""

from typing import TYPE_CHECKING, Protocol

from vllm.v1.residual.capture_plan import CaptureEnd

if TYPE_CHECKING:
    from vllm.v1.capture.frontend.tracking import Sample
    from vllm.v1.engine.output_processor import RequestState

SETTLE_SECONDS = 2.0
"""How long to wait for an engine that is about to stop to receive sent ends."""


class EndsSender(Protocol):
    """Sends ends of requests to an engine."""

    def __call__(self, ends: list[CaptureEnd]) -> None:
        """Send `ends`, possibly asynchronously."""

    def wait(self, timeout: float) -> None:
        """Wait until all sent ends have arrived, `timeout` seconds at most."""


class Ends:
    """Collects ends and sends them in batches."""

    def __init__(self, send: EndsSender, reply_to: str) -> None:
        """Start with no ends.

        Args:
            send: sends a batch to the engine.
            reply_to: ZMQ address for the results.

        """
        self._send = send
        self._reply_to = reply_to
        self._noted: list[CaptureEnd] = []

    def note(self, state: "RequestState", sample: "Sample", finish_reason: str) -> None:
        """Add the end of a sample, with the tokens that its client received."""
        assert state.detokenizer is not None
        token_ids = list(state.detokenizer.output_token_ids)
        collector = state.residual.readouts
        kept = {} if collector is None else collector.kept(len(token_ids))
        stop = state.prompt_len + max(len(token_ids) - 1, 0)
        sample.note_kept(kept, stop)
        self._noted.append(
            CaptureEnd(
                request_id=state.request_id,
                reply_to=self._reply_to,
                token_ids=token_ids,
                sample_index=state.request_index,
                finish_reason=finish_reason,
                instances=list(sample.instances),
                readouts=[] if collector is None else collector.rows(len(token_ids)),
                kept=kept,
            )
        )

    def flush(self) -> None:
        """Send the collected ends."""
        if self._noted:
            ends, self._noted = self._noted, []
            self._send(ends)

    def settle(self) -> None:
        """Wait until sent ends have arrived, `SETTLE_SECONDS` at most."""
        self._send.wait(SETTLE_SECONDS)
