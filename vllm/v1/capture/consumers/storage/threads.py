# SPDX-License-Identifier: Apache-2.0
"""The threads that encode and write, and the bound on the rows that wait for them."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from vllm.logger import init_logger

logger = init_logger(__name__)

Task = Callable[[], None]


class Executor:
    """Runs tasks from one bounded queue, which they begin in the order they came.

    Threads start as tasks find none idle, up to `most_threads`. Any thread may call.
    """

    def __init__(self, name: str, most_threads: int, queue_size: int) -> None:
        """Begin with no thread.

        Args:
            name: of the threads, numbered.
            most_threads: how many tasks may run at the same time.
            queue_size: how many tasks may wait.

        """
        self._name = name
        self._most_threads = most_threads
        self._queue_size = queue_size
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closing = False
        self._changed = threading.Condition()

    def put(self, task: Task, timeout: float) -> bool:
        """Queue `task`; False if the queue stays full for `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._tasks) < self._queue_size, timeout
            ):
                return False
            self._tasks.append(task)
            if self._idle < len(self._tasks) and self._may_grow:
                self._start_thread()
            self._changed.notify_all()
            return True

    def close(self, timeout: float) -> bool:
        """Work off the queue; False if that takes longer than `timeout` seconds."""
        deadline = monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _may_grow(self) -> bool:
        return len(self._threads) < self._most_threads

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:
                # A task reports its own failures; this is one that it missed.
                logger.exception("Writing captured rows failed")
            # The rows that the task holds must not live until the next one comes.
            del task

    def _next(self) -> Task | None:
        """The oldest task; None once the queue is closed and empty."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks or self._closing)
            self._idle -= 1
            if not self._tasks:
                return None
            task = self._tasks.popleft()
            self._changed.notify_all()
            return task


class MemoryBudget:
    """Counts the bytes of rows that one consumer holds; any thread may call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._stalled = False
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes that are counted now."""
        return self._held

    def add(self, size: int) -> None:
        """Count `size` bytes more, whether or not they fit."""
        with self._changed:
            self._held += size

    def release(self, size: int, written: bool = True) -> None:
        """Count `size` bytes less, because they were written or were given up."""
        with self._changed:
            self._held -= size
            self._stalled = self._stalled and not written
            assert self._held >= 0, f"{-self._held} bytes were released twice"
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until the bytes fit; False if they still do not.

        After one wait in vain, further ones return at once until something is
        written: a stuck disk must not stop the caller again and again.
        """
        with self._changed:
            if self._held <= self.limit:
                return True
            if self._stalled:
                return False
            fits = self._changed.wait_for(lambda: self._held <= self.limit, timeout)
            self._stalled = not fits
            return fits
