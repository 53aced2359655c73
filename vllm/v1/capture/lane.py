# SPDX-License-Identifier: Apache-2.0
"""One consumer instance's thread: isolation from the step and from each other."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from vllm.logger import init_logger
from vllm.v1.capture.results import merge
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

logger = init_logger(__name__)

RESULT_TIMEOUT = 60.0
"""Seconds that a sink may take from a request's finalizes to their results."""


@dataclass(frozen=True, slots=True)
class Ending:
    """All streams of a request at one instance are complete."""

    request_id: str
    finalizes: tuple[CaptureFinalize, ...]
    answer: Callable[[CaptureResult], None]
    """Called on the lane's thread with the merged result."""


class SinkLane:
    """Feeds one sink from a bounded queue, on a thread of its own.

    Whatever the sink raises becomes the result of the key it concerns; it
    reaches neither the engine nor another consumer.
    """

    def __init__(
        self, instance: str, sink: CaptureSink, max_bytes: int, max_items: int
    ) -> None:
        self.instance = instance
        self.sink = sink
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._items: deque[Sequence[CaptureChunk] | Ending] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failures: dict[CaptureKey, str] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"capture-{instance}", daemon=True
        )
        self._thread.start()

    def submit(self, chunks: Sequence[CaptureChunk]) -> None:
        """Queue the rows of a step; waits while the queue is full."""
        size = _size(chunks)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._items
                    or (
                        self._bytes + size <= self._max_bytes
                        and len(self._items) < self._max_items
                    )
                )
            )
            self._items.append(chunks)
            self._bytes += size
            self._changed.notify_all()

    def finish(self, ending: Ending) -> None:
        """Queue a request's end; never waits, as it holds no rows."""
        with self._changed:
            self._items.append(ending)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Work off the queue, at most `timeout` seconds, and shut the sink down."""
        deadline = monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error(
                "Consumer %s did not work off its queue in %.0f s: %d items with "
                "%d bytes of captured rows are lost",
                self.instance,
                timeout,
                len(self._items),
                self._bytes,
            )
        try:
            self.sink.shutdown(max(deadline - monotonic(), 0.0))
        except Exception:
            logger.exception("Consumer %s failed to shut down", self.instance)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing)
                if not self._items:
                    return
                item = self._items[0]
            # The item keeps its place in the queue while it is worked on, so
            # that the bounds count the rows that the sink still holds.
            if isinstance(item, Ending):
                self._end(item)
            else:
                self._feed(item)
            with self._changed:
                self._items.popleft()
                if not isinstance(item, Ending):
                    self._bytes -= _size(item)
                self._changed.notify_all()

    def _feed(self, chunks: Sequence[CaptureChunk]) -> None:
        live = [chunk for chunk in chunks if chunk.key not in self._failures]
        batch = getattr(self.sink, "submit_chunk_batch", None)
        if batch is not None:
            try:
                batch(live)
            except Exception as error:
                for chunk in live:
                    self._fail(chunk.key, error)
            return
        for chunk in live:
            if chunk.key in self._failures:
                continue
            try:
                self.sink.submit_chunk(chunk)
            except Exception as error:
                self._fail(chunk.key, error)

    def _fail(self, key: CaptureKey, error: Exception) -> None:
        logger.error(
            "Consumer %s failed on %s: %s: %s",
            self.instance,
            key,
            type(error).__name__,
            error,
        )
        self._failures[key] = f"{type(error).__name__}: {error}"

    def _end(self, ending: Ending) -> None:
        for finalize in ending.finalizes:
            if finalize.key in self._failures:
                finalize.sidecar.setdefault(
                    "capture_error", self._failures[finalize.key]
                )
            try:
                self.sink.submit_finalize(finalize)
            except Exception as error:
                self._fail(finalize.key, error)
        self._end_request(ending)
        when_done = getattr(self.sink, "when_done", None)
        if when_done is None or not ending.finalizes:
            self._answer(ending)
        else:
            # Meanwhile the sink gets what follows, so that it can write the rows
            # of several requests at once.
            when_done(ending.request_id, lambda: self._answer(ending))

    def _answer(self, ending: Ending) -> None:
        """Give the results, on the lane's thread or on one of the sink's."""
        deadline = monotonic() + RESULT_TIMEOUT
        results = [self._result_of(final, deadline) for final in ending.finalizes]
        for finalize in ending.finalizes:
            self._failures.pop(finalize.key, None)
        if not results:
            key: Any = (ending.request_id, -1, "*")
            results = [CaptureResult(key, "ok")]
        try:
            ending.answer(merge(ending.request_id, results))
        except Exception:
            logger.exception(
                "The result of %s at consumer %s was not delivered",
                ending.request_id,
                self.instance,
            )

    def _end_request(self, ending: Ending) -> None:
        request_end = getattr(self.sink, "submit_request_end", None)
        if request_end is None:
            return
        try:
            request_end(ending.request_id, ending.finalizes)
        except Exception as error:
            for finalize in ending.finalizes:
                self._fail(finalize.key, error)

    def _result_of(self, finalize: CaptureFinalize, deadline: float) -> CaptureResult:
        key = finalize.key
        result: CaptureResult | None = None
        try:
            result = self._wait_for(key, deadline)
        except Exception as error:
            self._fail(key, error)
        failure = self._failures.get(key) or finalize.sidecar.get("capture_error")
        if failure is not None:
            return CaptureResult(key, "error", failure)
        if result is None or result.status == "pending":
            return CaptureResult(
                key, "error", f"no result within {RESULT_TIMEOUT:.0f} s"
            )
        note = finalize.sidecar.get("capture_note")
        if note is not None and result.status == "ok":
            return CaptureResult(key, "partial_error", note, result.payload)
        return result

    def _wait_for(self, key: CaptureKey, deadline: float) -> CaptureResult | None:
        result = self.sink.get_result(key)
        if result is not None and result.status != "pending":
            return result
        waiting = getattr(self.sink, "wait_for_result", None)
        if waiting is not None:
            return waiting(key, max(deadline - monotonic(), 0.0))
        while (result is None or result.status == "pending") and (
            monotonic() < deadline
        ):
            sleep(0.005)
            result = self.sink.get_result(key)
        return result


def _size(chunks: Sequence[CaptureChunk]) -> int:
    return sum(chunk.tensor.nbytes for chunk in chunks)
