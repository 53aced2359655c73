# SPDX-License-Identifier: Apache-2.0
"""Threads that prepare what is written, each with a bounded queue of its own."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from vllm.logger import init_logger

logger = init_logger(__name__)

Task = Callable[[], None]


class _Worker:
    def __init__(self, name: str, queue_size: int) -> None:
        self._queue_size = queue_size
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, task: Task, timeout: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._tasks) < self._queue_size, timeout
            ):
                return False
            self._tasks.append(task)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._changed.notify_all()
            try:
                task()
            except Exception:
                # A task reports its own failures; this is one that it missed.
                logger.exception("Writing captured rows failed")
            # The rows that the task holds must not live until the next one comes.
            del task


class TaskPool:
    """Runs tasks; those of one slot run one after the other, in their order."""

    def __init__(self, name: str, num_threads: int, queue_size: int) -> None:
        self._workers = [
            _Worker(f"{name}-{index}", queue_size) for index in range(num_threads)
        ]

    def put(self, slot: int, task: Task, timeout: float) -> bool:
        """Queue `task`; False if the queue stays full for `timeout` seconds."""
        return self._workers[slot % len(self._workers)].put(task, timeout)

    def close(self, timeout: float) -> bool:
        """Work off the queues; False if that takes longer than `timeout` seconds."""
        deadline = monotonic() + timeout
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.thread.join(max(deadline - monotonic(), 0.0))
        return not any(worker.thread.is_alive() for worker in self._workers)
