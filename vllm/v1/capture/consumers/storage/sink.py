# SPDX-License-Identifier: Apache-2.0
"""The base sink of consumers that write files: bounded memory, threads, deadlines."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.files import Workspace
from vllm.v1.capture.consumers.storage.options import global_spec
from vllm.v1.capture.consumers.storage.params import StorageParams
from vllm.v1.capture.consumers.storage.shards import ShardSet, Task
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.delivery.spill import RowFiles
from vllm.v1.capture.groups import GroupChunk, GroupEnd, GroupSink
from vllm.v1.capture.types import (
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)
from vllm.v1.residual.plugin_errors import described

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

MIB = 1 << 20

TICK_SECONDS = 0.02
"""Period of the clock thread."""


class StorageSink(GroupSink):
    """A `CaptureSink` that collects the rows of a request and then publishes them.

    Rows stay in memory until the request ends, up to `buffer_bytes` over all requests.
    Beyond that, the running requests with the most rows are spilled to disk.
    """

    location: Literal["worker", "driver"] = "worker"
    instance_name: str = ""
    """The name that requests use; set by the framework."""
    remembers_specs: ClassVar[bool] = False
    truncates: ClassVar[bool] = True
    batches_steps: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        vllm_config: "VllmConfig | None",
        params: StorageParams,
    ) -> None:
        self._name = name
        self._spec = global_spec(
            params.global_hooks,
            params.global_positions,
            vllm_config,
            f"capture_consumers.{name}",
        )
        self._shards: ShardSet[Any] = ShardSet(params.shard_max_bytes)
        """Of files that several requests share."""
        self._timeout = params.timeout_seconds
        self._budget = MemoryBudget(params.buffer(vllm_config))
        self._requests: dict[str, StoredRequest] = {}
        self._lock = threading.Lock()
        self._workspace = Workspace(params.root)
        # The instance in the front end only validates specs, so threads and
        # directories are created with the first row.
        self._executor = Executor(
            f"capture-{name}-writer", params.num_threads, params.queue_size
        )
        self._spilled = RowFiles(self._workspace.own)
        self._rewritten_bytes = 0
        self._clock: threading.Thread | None = None
        self._closing = threading.Event()
        self._waiting = threading.Event()
        self._unusable: str | None = None

    @property
    def folder(self) -> Path:
        """The root directory, which no other instance may use."""
        return self._workspace.root

    def global_capture_spec(self) -> CaptureSpec | None:
        """The spec of `global_hooks` and `global_positions`."""
        return self._spec

    @abstractmethod
    def publish(self, request: StoredRequest, finalizes: list[CaptureFinalize]) -> None:
        """Write the rows of a request, and settle it now or when its shard is sealed.

        Called on the executor's threads.

        Args:
            request: the request.
            finalizes: its keys that have not failed, at least one.

        Raises:
            OSError: nothing was written.

        """

    # Rows, on the consumer's thread.

    def submit_rows(self, items: Sequence[GroupChunk]) -> None:
        """Take the rows of a packet; blocks while the buffer is full."""
        self._start()
        requests = [self._request(item.request_id) for item in items]
        taken = [pair for pair in zip(requests, items) if pair[0].failure is None]
        # Counted first: a thread that spills the request may release rows at once.
        self._budget.add(sum(item.tensor.nbytes for _, item in taken))
        for request, item in taken:
            request.rows.add(item.taps, item.tensor)
        if self._budget.held > self._budget.limit:
            self._relieve({request.request_id for request in requests})

    def _request(self, request_id: str) -> StoredRequest:
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = StoredRequest(request_id)
                request.failure = self._unusable
            return request

    def _relieve(self, latest: set[str]) -> None:
        """Wait until the buffer has room, spilling running requests if necessary.

        Ended requests are being written and free their memory soon. Spilled rows are
        written twice, so requests are spilled only if running ones alone use more than
        half of the buffer.
        """
        with self._lock:
            running = [
                request
                for request in self._requests.values()
                if request.ended_at is None and not request.spilling
            ]
        running.sort(key=lambda request: request.rows.memory_bytes, reverse=True)
        held = sum(request.rows.memory_bytes for request in running)
        excess = held - self._budget.limit // 2
        for request in running:
            if excess <= 0 or not request.rows.memory_bytes:
                break
            excess -= request.rows.memory_bytes
            request.spilling = True
            if not self._executor.put(partial(self._spill, request), self._timeout):
                request.spilling = False
        if not self._budget.wait(self._timeout):
            for request_id in latest:
                self._lose(
                    self._request(request_id),
                    f"the disk accepted no rows for {self._timeout:g} s "
                    "(timeout_seconds)",
                )

    def _lose(self, request: StoredRequest, failure: str) -> None:
        request.failure = request.failure or failure
        self._budget.release(request.rows.discard(), written=False)

    def _spill(self, request: StoredRequest) -> None:
        failure, freed = None, 0
        try:
            freed = request.rows.spill(self._spilled)
        except OSError as error:
            logger.error("Rows of %s are lost: %s", request.request_id, error)
            failure = described(error)
        # Before memory is released: a waiting thread may spill the request again.
        request.spilling = False
        if failure is not None:
            self._lose(request, failure)
        else:
            # Rows that were lost meanwhile do not show that the disk works.
            self._budget.release(freed, written=freed > 0)
            self._note_spilled(freed)

    def rewritten_bytes(self) -> int:
        """Total bytes of rows that were spilled, and are therefore written twice."""
        return self._rewritten_bytes

    def _note_spilled(self, size: int) -> None:
        with self._lock:
            is_first = not self._rewritten_bytes
            self._rewritten_bytes += size
        if is_first:
            logger.warning(
                "%s: captured rows are spilled to disk, and so written twice, because "
                "unfinished requests hold more than half of the %d MiB of "
                "buffer_bytes; raise it, or run fewer requests at a time",
                self._name,
                self._budget.limit // MIB,
            )

    # The end of a request.

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Note the end of a key; its rows are written when the request has ended."""
        self._start()
        self._request(finalize.key[0]).finalizes[finalize.key] = finalize

    def submit_ends(self, request_id: str, ends: Sequence[GroupEnd]) -> None:
        """Do nothing, so that the keys are ended one by one."""

    def submit_request_end(
        self, request_id: str, finalizes: Sequence[CaptureFinalize]
    ) -> None:
        """Queue a request, all keys of which have ended, for writing."""
        self._start()
        request = self._request(request_id)
        if request.ended_at is not None:
            return
        with self._lock:  # The clock clears `_waiting` under this lock.
            request.ended_at = monotonic()
            self._waiting.set()
        if not self._executor.put(partial(self._publish, request), self._timeout):
            request.settle_error(
                "the queue of requests to write stayed full for "
                f"{self._timeout:g} s (timeout_seconds)"
            )
            self._budget.release(request.rows.discard())

    def _publish(self, request: StoredRequest) -> None:
        try:
            if request.settled.is_set():
                return
            if finalizes := request.writable():
                self.publish(request, finalizes)
            else:  # All keys have failed, or are in other pipeline stages.
                request.settle(())
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("Writing the capture of %s", request.request_id)
            request.settle_error(described(error))
        finally:
            request.published = True
            self._budget.release(request.rows.discard())

    # Results.

    def when_done(self, request_id: str, notify: Callable[[], None]) -> None:
        """Call `notify` once, from any thread, when the request has its results."""
        self._request(request_id).when_settled(notify)

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The result of a finalized key, which is waited for and then removed."""
        return self.wait_for_result(key, self._timeout + 5)

    def wait_for_result(self, key: CaptureKey, timeout: float) -> CaptureResult | None:
        """The result of a key, which is removed; None after `timeout` seconds."""
        with self._lock:
            request = self._requests.get(key[0])
        if request is None or key not in request.finalizes:
            return None
        self.submit_request_end(key[0], ())
        if not request.settled.wait(timeout):
            return None
        result = request.results.pop(key, None)
        if not request.results:
            with self._lock:
                self._requests.pop(key[0], None)
        return result

    # Threads.

    def _start(self) -> None:
        if self._clock is not None:
            return
        try:
            self._workspace.open()
        except OSError as error:
            self._unusable = described(error)
            logger.error("%s cannot write: %s", self._name, self._unusable)
        self._clock = threading.Thread(
            target=self._run_clock, name=f"capture-{self._name}-clock", daemon=True
        )
        self._clock.start()

    def _run_clock(self) -> None:
        """Seal shards that are due, and fail requests that take too long."""
        while not self._closing.wait(TICK_SECONDS):
            if not self._waiting.wait(1.0):
                continue
            now = monotonic()
            with self._lock:
                requests = list(self._requests.values())
                running = not all(request.published for request in requests)
                pending = [request for request in requests if request.is_pending]
                if not pending:
                    self._waiting.clear()
            self._complete_due(now, closing=False, running=running)
            for request in pending:
                assert request.ended_at is not None
                if now - request.ended_at > self._timeout:
                    request.give_up(
                        f"not written within {self._timeout:g} s (timeout_seconds)"
                    )

    def _complete_due(self, now: float, closing: bool, running: bool) -> None:
        for task in self._shards.due(now, closing, running):
            self._executor.put(task, 0.0)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Write ended requests within `timeout` seconds, and remove other rows."""
        if self._clock is None:
            return
        began = monotonic()
        deadline = began + timeout
        self._closing.set()
        self._waiting.set()
        self._clock.join(timeout)
        self._settle_all(began + timeout / 2, deadline)
        self._executor.close(max(deadline - monotonic(), 0.0))
        for request in list(self._requests.values()):
            if request.ended_at is None:
                logger.error(
                    "The capture of %s did not end; its rows are removed",
                    request.request_id,
                )
                request.rows.discard()
            elif not request.settled.is_set():
                request.give_up(f"the server stopped {timeout:g} s before")
        self._workspace.close()

    def _settle_all(self, late: float, deadline: float) -> None:
        """Seal all shards, and wait until all ended requests are settled.

        Args:
            late: until then, shards wait for the requests that are still being added.
            deadline: when to give up.

        """
        while monotonic() < deadline:
            with self._lock:
                pending = [one for one in self._requests.values() if one.is_pending]
            if not pending:
                return
            adding = not all(request.published for request in pending)
            now = monotonic()
            self._complete_due(now, closing=not adding or now > late, running=adding)
            pending[0].settled.wait(min(TICK_SECONDS, deadline - monotonic()))


class Executor:
    """Daemon threads with a bounded queue; thread-safe.

    Tasks are started in FIFO order. A thread is started with a task that waits, up to
    `most_threads`.
    """

    def __init__(self, name: str, most_threads: int, queue_size: int) -> None:
        """Start without threads.

        Args:
            name: prefix of the threads' names.
            most_threads: maximum number of threads.
            queue_size: maximum number of waiting tasks.

        """
        self._name = name
        self._most_threads = most_threads
        self._tasks: Queue[Task | None] = Queue(queue_size)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def put(self, task: Task, timeout: float) -> bool:
        """Queue `task`; False if the queue stays full for `timeout` seconds."""
        try:
            self._tasks.put(task, timeout=timeout)
        except Full:
            return False
        with self._lock:
            if len(self._threads) < self._most_threads and not self._tasks.empty():
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return True

    def close(self, timeout: float) -> None:
        """Run the queued tasks, for `timeout` seconds at most, and stop."""
        deadline = monotonic() + timeout
        for _ in self._threads:
            with suppress(Full):
                self._tasks.put(None, timeout=max(deadline - monotonic(), 0.0))
        for thread in self._threads:
            thread.join(max(deadline - monotonic(), 0.0))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                # Tasks report their own failures; this is an unexpected one.
                logger.exception("Writing captured rows failed")
            # Free the rows that the task refers to before waiting for the next one.
            del task


class MemoryBudget:
    """Counts the bytes of rows that one consumer holds in memory; thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        """Bytes held now."""
        self._stalled = False
        self._changed = threading.Condition()

    def add(self, size: int) -> None:
        """Add `size` bytes, even if they exceed the limit."""
        with self._changed:
            self.held += size

    def release(self, size: int, written: bool = True) -> None:
        """Subtract `size` bytes, which were written or (`written=False`) discarded."""
        with self._changed:
            self.held -= size
            self._stalled = self._stalled and not written
            assert self.held >= 0, f"{-self.held} bytes were released twice"
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until the held bytes are within the limit; False on a timeout.

        After a wait has timed out, further ones return at once until something is
        written, so that a stuck disk does not block the caller each time.
        """
        with self._changed:
            if self.held <= self.limit:
                return True
            if self._stalled:
                return False
            fits = self._changed.wait_for(lambda: self.held <= self.limit, timeout)
            self._stalled = not fits
            return fits
