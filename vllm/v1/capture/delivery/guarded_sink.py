# SPDX-License-Identifier: Apache-2.0
"""`GuardedSink`: calls of a sink, whose exceptions become results of the keys."""

import threading
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from vllm.logger import init_logger
from vllm.v1.capture.capabilities import sink_capabilities
from vllm.v1.capture.delivery.packet_queue import Ending, Opening
from vllm.v1.capture.groups import GroupChunk, chunks_in
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult
from vllm.v1.residual.plain_data import fault_of
from vllm.v1.residual.plugin_errors import FAILURES, described

logger = init_logger(__name__)

RESULT_TIMEOUT = 60.0
"""Seconds that a sink may take from a request's finalizes to its results."""

SHUTDOWN_GRACE = 2.0
"""Seconds that a sink's shutdown may exceed its timeout by."""

Outcome = tuple[CaptureResult, int]
"""A result, and the number of rows that it is about."""


class GuardedSink:
    """A sink of which no exception escapes, and whose calls are timed.

    This includes exceptions that are not an `Exception`, such as `SystemExit`, which
    would only end the calling thread. Rows and ends are passed on one thread, that of
    the lane; `outcomes` is also called on one of the sink's.
    """

    def __init__(self, instance: str, sink: CaptureSink) -> None:
        self.instance = instance
        self.sink = sink
        self.can = sink_capabilities(sink)
        self.failures: dict[CaptureKey, str] = {}
        """Keys that have failed: they get no more rows, and an error result."""
        self._refusals: dict[str, str] = {}
        self._unfinished: set[CaptureKey] = set()
        """Keys whose `submit_finalize` raised: the sink has no result for them."""
        self._thread: threading.Thread | None = None
        self.call_began: float | None = None
        """When the present call began on the lane's thread; None between calls."""

    def rest(self) -> None:
        """Note that no call is made until the next item, on the lane's thread."""
        self._thread = threading.current_thread()
        self.call_began = None

    def open(self, opening: Opening) -> None:
        """Pass the spec of a request that starts."""
        try:
            self._begin_call()
            opening.pass_spec()
        except BaseException as error:
            FAILURES.log(self.instance, f"the spec of {opening.request_id}", error)
            self._refusals[opening.request_id] = described(error)

    def feed(self, items: Sequence[GroupChunk]) -> None:
        """Pass rows, in the largest units that the sink takes."""
        groups, batch = self.can.groups, self.can.submit_chunk_batch
        try:
            if groups is not None:
                self._begin_call()
                groups.submit_rows(items)
                return
            live = chunks_in(items)
            if batch is not None:
                self._begin_call()
                batch(live)
                return
        except BaseException as error:
            for key in (key for item in items for key in item.keys):
                self.fail(key, error)
            return
        for chunk in live:
            if chunk.key in self.failures:
                continue
            try:
                self._begin_call()
                self.sink.submit_chunk(chunk)
            except BaseException as error:
                self.fail(chunk.key, error)

    def fail(self, key: CaptureKey, error: BaseException) -> None:
        """Log an exception, and let it be the result of a key."""
        FAILURES.log(self.instance, key, error)
        self.failures[key] = described(error)

    def finish_groups(self, ending: Ending) -> list[Outcome] | None:
        """End whole groups of keys; None if the sink takes the keys one by one.

        So it does if any key has failed, because the others of its group may not have.
        """
        refusal = self._refusals.pop(ending.request_id, None)
        if refusal is not None:
            for finalize in ending.finalizes:
                self.failures.setdefault(finalize.key, refusal)
        groups = self.can.groups
        failed = any("capture_error" in end.sidecar for end in ending.ends)
        if groups is None or self.failures or failed:
            return None
        try:
            self._begin_call()
            results = groups.submit_ends(ending.request_id, ending.ends)
        except BaseException as error:
            FAILURES.log(self.instance, ending.request_id, error)
            key: Any = (ending.request_id, -1, "*")
            error_of_all = CaptureResult(key, "error", described(error))
            results = [error_of_all] * len(ending.ends)
        if results is None:
            return None
        return [
            (
                noted(result, end.sidecar),
                end.sidecar.get("num_rows", 0) * len(end.taps),
            )
            for end, result in zip(ending.ends, results, strict=True)
        ]

    def finish_keys(self, ending: Ending) -> None:
        """End the keys of a request one by one, then the request."""
        for finalize in ending.finalizes:
            if finalize.key in self.failures:
                finalize.sidecar.setdefault(
                    "capture_error", self.failures[finalize.key]
                )
            try:
                self._begin_call()
                self.sink.submit_finalize(finalize)
            except BaseException as error:
                self.fail(finalize.key, error)
                self._unfinished.add(finalize.key)
        if self.can.submit_request_end is None:
            return
        try:
            self._begin_call()
            self.can.submit_request_end(ending.request_id, ending.finalizes)
        except BaseException as error:
            for finalize in ending.finalizes:
                self.fail(finalize.key, error)

    def outcomes(self, ending: Ending) -> list[Outcome]:
        """Collect the results of a request whose keys were ended."""
        deadline = monotonic() + RESULT_TIMEOUT
        found = [
            (self._result_of(final, deadline), final.sidecar.get("num_rows", 0))
            for final in ending.finalizes
        ]
        self.forget(ending)
        return found

    def forget(self, ending: Ending) -> None:
        """Forget the failures of a request."""
        for finalize in ending.finalizes:
            self.failures.pop(finalize.key, None)

    def _result_of(self, finalize: CaptureFinalize, deadline: float) -> CaptureResult:
        key = finalize.key
        result: CaptureResult | None = None
        if key in self._unfinished:
            self._unfinished.discard(key)
            deadline = 0.0
        try:
            result = self._wait_for(key, deadline)
        except BaseException as error:
            self.fail(key, error)
        failure = self.failures.get(key) or finalize.sidecar.get("capture_error")
        if failure is not None:
            return CaptureResult(key, "error", failure)
        if result is None or result.status == "pending":
            return CaptureResult(
                key, "error", f"no result within {RESULT_TIMEOUT:.0f} s"
            )
        # Its own class holds what the consumers of this project put into it.
        is_plain = type(result.payload) is RowsByTap
        fault = None if is_plain else fault_of(result.payload)
        if fault is not None:
            return CaptureResult(key, "error", f"the consumer's payload {fault}")
        return noted(result, finalize.sidecar)

    def _wait_for(self, key: CaptureKey, deadline: float) -> CaptureResult | None:
        self._begin_call()
        result = self.sink.get_result(key)
        if result is not None and result.status != "pending":
            return result
        waiting = self.can.wait_for_result
        if waiting is not None:
            return waiting(key, max(deadline - monotonic(), 0.0))
        while (result is None or result.status == "pending") and (
            monotonic() < deadline
        ):
            sleep(0.005)
            self._begin_call()
            result = self.sink.get_result(key)
        return result

    def _begin_call(self) -> None:
        """Note when a call of the sink begins; calls on other threads may block."""
        if threading.current_thread() is self._thread:
            self.call_began = monotonic()

    def shut_down(self, timeout: float) -> None:
        """Shut down the sink on a thread, which is abandoned if it hangs."""
        shutting = threading.Thread(
            target=self._shutdown_sink,
            args=(timeout,),
            name=f"capture-{self.instance}-shutdown",
            daemon=True,
        )
        shutting.start()
        shutting.join(timeout + SHUTDOWN_GRACE)
        if shutting.is_alive():
            logger.error(
                "Consumer %s did not shut down in %.0f s and is abandoned",
                self.instance,
                timeout + SHUTDOWN_GRACE,
            )

    def _shutdown_sink(self, timeout: float) -> None:
        try:
            self.sink.shutdown(timeout)
        except BaseException as error:
            FAILURES.log(self.instance, "its shutdown", error)


def noted(result: CaptureResult, sidecar: Mapping[str, Any]) -> CaptureResult:
    """`result`, or a partial error if the sidecar notes that rows are missing."""
    note = sidecar.get("capture_note")
    if note is not None and result.status == "ok":
        return CaptureResult(result.key, "partial_error", note, result.payload)
    return result
