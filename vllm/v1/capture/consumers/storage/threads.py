# SPDX-License-Identifier: Apache-2.0
"""The writer threads of a storage consumer, and the bound on rows in memory."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from time import monotonic

from vllm.logger import init_logger

logger = init_logger(__name__)

Task = Callable[[], None]


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

    def close(self, timeout: float) -> bool:
        """Run the queued tasks and stop; False if that takes more than `timeout` s."""
        deadline = monotonic() + timeout
        for _ in self._threads:
            with suppress(Full):
                self._tasks.put(None, timeout=max(deadline - monotonic(), 0.0))
        for thread in self._threads:
            thread.join(max(deadline - monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

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
        self._held = 0
        self._stalled = False
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    def add(self, size: int) -> None:
        """Add `size` bytes, even if they exceed the limit."""
        with self._changed:
            self._held += size

    def release(self, size: int, written: bool = True) -> None:
        """Subtract `size` bytes, which were written or (`written=False`) discarded."""
        with self._changed:
            self._held -= size
            self._stalled = self._stalled and not written
            assert self._held >= 0, f"{-self._held} bytes were released twice"
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until the held bytes are within the limit; False on a timeout.

        After a wait has timed out, further ones return at once until something is
        written, so that a stuck disk does not block the caller each time.
        """
        with self._changed:
            if self._held <= self.limit:
                return True
            if self._stalled:
                return False
            fits = self._changed.wait_for(lambda: self._held <= self.limit, timeout)
            self._stalled = not fits
            return fits
