# SPDX-License-Identifier: Apache-2.0
"""The jobs that write one request."""

import threading
from collections.abc import Callable

from vllm.v1.capture.consumers.storage.jobs import Job
from vllm.v1.capture.consumers.storage.writers import Answer, Cancel, Writers


class Submission:
    """Hands a request's jobs to the writers, and knows when all are done.

    Jobs come from one thread, answers from others; `cancel` may come from any.
    """

    def __init__(
        self, writers: Writers, timeout: float, when_done: Callable[[], None]
    ) -> None:
        self._writers = writers
        self._timeout = timeout
        self._when_done = when_done
        self._lock = threading.Lock()
        self._under_way = 1  # until `finish`
        self._cancels: list[Cancel] = []
        self._cancelled = False

    def submit(self, job: Job, answer: Answer) -> None:
        """Have a job done.

        Raises:
            OSError: the writers' queue stayed full; there will be no answer.

        """
        with self._lock:
            self._under_way += 1

        def done(error: OSError | None) -> None:
            try:
                answer(error)
            finally:
                self._leave()

        cancel = self._writers.submit(job, done, self._timeout)
        if cancel is None:
            self._leave()
            raise TimeoutError(
                f"the writers' queue stayed full for {self._timeout:g} s "
                "(timeout_seconds)"
            )
        with self._lock:
            self._cancels.append(cancel)
            cancelled = self._cancelled
        if cancelled:
            cancel()

    def finish(self) -> None:
        """There will be no more jobs."""
        self._leave()

    def cancel(self) -> None:
        """Give up what has not taken effect yet."""
        with self._lock:
            self._cancelled = True
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()

    def _leave(self) -> None:
        with self._lock:
            self._under_way -= 1
            is_done = not self._under_way
        if is_done:
            self._when_done()


class Gathering:
    """Answers to several jobs; what completes them is called with the last one."""

    def __init__(self, count: int, complete: Callable[[], None]) -> None:
        self._left = count
        self._complete = complete
        self._lock = threading.Lock()

    def arrived(self) -> None:
        """One of them is there."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._complete()
