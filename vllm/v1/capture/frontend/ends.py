# SPDX-License-Identifier: Apache-2.0
"""Sends the ends of requests to the engine core, in batches."""

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from uuid import uuid1

from vllm.logger import init_logger
from vllm.v1.capture.core.engine import end_captures_now
from vllm.v1.capture.frontend.request_tracker import Sample
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.residual.capture_plan import CaptureEnd

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

logger = init_logger(__name__)

SETTLE_SECONDS = 2.0
"""How long to wait for an engine that is about to stop to receive sent ends."""


class Ends(ABC):
    """Collects ends and sends them; knows what the core has not answered yet."""

    def __init__(self, core: Any, reply_to: str) -> None:
        """Start with no ends.

        Args:
            core: the client of the engine core.
            reply_to: ZMQ address for the results.

        """
        self._core = core
        self._reply_to = reply_to
        self._noted: list[CaptureEnd] = []
        # The event loop keeps only weak references to tasks.
        self._sending: set[Any] = set()

    def note(self, state: "RequestState", sample: Sample, finish_reason: str) -> None:
        """Add the end of a sample, with the tokens that its client received."""
        assert state.detokenizer is not None
        token_ids = list(state.detokenizer.output_token_ids)
        collector = state.residual.readouts
        kept = {} if collector is None else collector.kept(len(token_ids))
        stop = state.prompt_len + max(len(token_ids) - 1, 0)
        sample.note_rows(kept, stop, state.num_cached_tokens)
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

    @abstractmethod
    def _send(self, ends: list[CaptureEnd]) -> None: ...

    @abstractmethod
    def settle(self, timeout: float = SETTLE_SECONDS) -> None:
        """Wait until sent ends have arrived, `timeout` seconds at most."""

    def _started(self, sending: "asyncio.Task[Any] | Future[Any]") -> None:
        self._sending.add(sending)
        sending.add_done_callback(self._answered)

    def _answered(self, sent: "asyncio.Task[Any] | Future[Any]") -> None:
        self._sending.discard(sent)
        error = None if sent.cancelled() else sent.exception()
        if error is not None and not isinstance(error, EngineDeadError):
            logger.error("The end of captures was not sent: %s", error)


class OfflineEnds(Ends):
    """Sends ends from the thread that runs an offline engine.

    A core in another process is not waited for: it answers between two steps, and has
    the outputs of the next one by then.
    """

    def _send(self, ends: list[CaptureEnd]) -> None:
        if not hasattr(self._core, "call_utility"):
            end_captures_now(self._core.engine_core, ends)
            return
        # As `call_utility` does, which would wait for the answer.
        number, sending = uuid1().int >> 64, Future[Any]()
        self._core.utility_results[number] = sending
        self._started(sending)
        request = 0, number, "end_captures", (ends,)
        self._core._send_input(EngineCoreRequestType.UTILITY, request)

    def settle(self, timeout: float = SETTLE_SECONDS) -> None:
        """Wait until sent ends have arrived, `timeout` seconds at most."""
        wait(list(self._sending), timeout)


class ServedEnds(Ends):
    """Sends ends from the event loop's thread, without blocking it."""

    def _send(self, ends: list[CaptureEnd]) -> None:
        sending = self._core.call_utility_async("end_captures", ends)
        self._started(asyncio.ensure_future(sending))

    def settle(self, timeout: float = SETTLE_SECONDS) -> None:
        """Wait for pending tasks; on the loop's own thread, which runs them, return."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            deadline = monotonic() + timeout
            while self._sending and monotonic() < deadline:
                sleep(0.01)
