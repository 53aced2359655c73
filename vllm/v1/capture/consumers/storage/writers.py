# SPDX-License-Identifier: Apache-2.0
"""Threads that write: native ones outside of the GIL, else Python ones.

A job's answer is called once, on a thread of the writers: None, or the `OSError`
that says why nothing of it is there.
"""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.jobs import Job, Permit, Publication, run
from vllm.v1.capture.native import Pool, library

logger = init_logger(__name__)

Answer = Callable[[OSError | None], None]
Cancel = Callable[[], bool]
"""True if the job will leave nothing; it is answered all the same."""

_COLLECT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """What bounds writers."""

    num_threads: int
    max_bytes: int
    """Bytes of all jobs under way; one larger job is taken alone."""
    max_call_bytes: int
    """Bytes per system call."""


class Writers(Protocol):
    """Any thread may call."""

    def submit(self, job: Job, answer: Answer, timeout: float) -> Cancel | None:
        """Queue a job; None, and no answer, if the queue stays full so long."""
        ...

    def close(self, timeout: float) -> bool:
        """Work off the queue; False if that takes longer, and the rest is cancelled."""
        ...


def open_writers(name: str, limits: WriterLimits) -> Writers:
    """Native writers where there is a native library."""
    native = library()
    if native is None:
        return PythonWriters(name, limits)
    pool = native.WriterPool(
        limits.num_threads, limits.max_bytes, limits.max_call_bytes
    )
    return NativeWriters(name, pool)


class NativeWriters:
    """The threads are native; one Python thread gives the answers."""

    def __init__(self, name: str, pool: Pool) -> None:
        self._pool = pool
        self._answers: dict[int, Answer] = {}
        self._submitted = threading.Condition()
        self._closed = False
        self._collector = threading.Thread(
            target=self._collect, name=f"{name}-answers", daemon=True
        )
        self._collector.start()

    def submit(self, job: Job, answer: Answer, timeout: float) -> Cancel | None:
        """Queue a job; None, and no answer, if the queue stays full so long."""
        number = _queue(self._pool, job, timeout)
        if number is None:
            return None
        with self._submitted:
            self._answers[number] = answer
            self._submitted.notify()
        return lambda: self._pool.cancel(number)

    def close(self, timeout: float) -> bool:
        """Work off the queue; False if that takes longer, and the rest is cancelled."""
        ended = self._pool.close(timeout)
        self._closed = True
        self._collector.join(2 * _COLLECT_SECONDS)
        return ended

    def _collect(self) -> None:
        while True:
            closed = self._closed  # what is done by now is taken once more
            for number, code, path in self._pool.take(_COLLECT_SECONDS):
                error = OSError(code, os.strerror(code), path or None) if code else None
                _give(self._answer_to(number), error)
            if closed:
                return

    def _answer_to(self, number: int) -> Answer:
        with self._submitted:
            # The job may be done before its id has reached `submit`. Answering from
            # there would surprise callers that hold a lock.
            self._submitted.wait_for(lambda: number in self._answers)
            return self._answers.pop(number)


def _queue(pool: Pool, job: Job, timeout: float) -> int | None:
    if isinstance(job, Publication):
        return pool.publish(
            job.rows_aside,
            job.rows_name,
            job.rows,
            job.index_aside,
            job.index_name,
            job.index,
            job.replace,
            job.fsync,
            timeout,
        )
    return pool.append(job.file, job.offset, job.data, timeout)


def _give(answer: Answer, error: OSError | None) -> None:
    try:
        answer(error)
    except Exception:
        logger.exception("The answer to a write was not taken")


@dataclass(slots=True)
class _Queued:
    job: Job
    answer: Answer
    permit: Permit = field(default_factory=Permit)


class PythonWriters:
    """The same with Python threads."""

    def __init__(self, name: str, limits: WriterLimits) -> None:
        self._limits = limits
        self._queue: deque[_Queued] = deque()
        self._running: set[int] = set()
        self._bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(limits.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, answer: Answer, timeout: float) -> Cancel | None:
        """Queue a job; None, and no answer, if the queue stays full so long."""
        size = job.num_bytes
        queued = _Queued(job, answer)
        with self._changed:
            fits = self._changed.wait_for(
                lambda: (
                    self._closing
                    or not self._bytes
                    or self._bytes + size <= self._limits.max_bytes
                ),
                timeout,
            )
            if not fits or self._closing:
                return None
            self._bytes += size
            self._queue.append(queued)
            self._changed.notify_all()
        return queued.permit.cancel

    def close(self, timeout: float) -> bool:
        """Work off the queue; False if that takes longer, and the rest is cancelled."""
        deadline = monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - monotonic(), 0.0))
        ended = not any(thread.is_alive() for thread in self._threads)
        with self._changed:
            for queued in self._queue:
                queued.permit.cancel()
        return ended

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                queued = self._queue.popleft()
            error = self._run(queued)
            with self._changed:
                self._bytes -= queued.job.num_bytes
                self._changed.notify_all()
            _give(queued.answer, error)
            # The rows that it holds must not live until the next one comes.
            del queued

    def _run(self, queued: _Queued) -> OSError | None:
        try:
            run(queued.job, queued.permit, self._limits.max_call_bytes)
        except OSError as error:
            return error
        except Exception as error:
            logger.exception("Writing captured rows failed")
            return OSError(errno.EIO, str(error))
        return None
