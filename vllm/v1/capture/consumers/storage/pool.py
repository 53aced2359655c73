# SPDX-License-Identifier: Apache-2.0
"""Threads that write, each with a bounded queue of its own."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from vllm.logger import init_logger

logger = init_logger(__name__)

Job = Callable[[], None]


class _Writer:
    def __init__(self, name: str, queue_size: int) -> None:
        self._queue_size = queue_size
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, job: Job, timeout: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._jobs) < self._queue_size, timeout
            ):
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._changed.notify_all()
            try:
                job()
            except Exception:
                # A job reports its own failures; this is one that it missed.
                logger.exception("Writing captured rows failed")
            # The rows that the job holds must not live until the next one comes.
            del job


class WriterPool:
    """Runs jobs; those of one slot run one after the other, in their order."""

    def __init__(self, name: str, num_threads: int, queue_size: int) -> None:
        self._writers = [
            _Writer(f"{name}-{index}", queue_size) for index in range(num_threads)
        ]

    def put(self, slot: int, job: Job, timeout: float) -> bool:
        """Queue `job`; False if the queue stays full for `timeout` seconds."""
        return self._writers[slot % len(self._writers)].put(job, timeout)

    def close(self, timeout: float) -> bool:
        """Work off the queues; False if that takes longer than `timeout` seconds."""
        deadline = monotonic() + timeout
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            writer.thread.join(max(deadline - monotonic(), 0.0))
        return not any(writer.thread.is_alive() for writer in self._writers)
