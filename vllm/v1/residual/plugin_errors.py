# SPDX-License-Identifier: Apache-2.0
"""What the engine catches where it calls a plug-in or a user's function."""

import signal
import threading
from types import TracebackType

from vllm.logger import init_logger

logger = init_logger(__name__)

MOST_CHARACTERS = 1000
"""Longest message of an error that is passed on."""


def is_interrupt(error: BaseException) -> bool:
    """Whether the user interrupts this process, and no plug-in raised the error.

    A server's processes handle SIGINT otherwise, so only code raises
    `KeyboardInterrupt` there. Anything else that is not an `Exception`, such as
    `SystemExit`, is an error of the plug-in and must not end the engine.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and usual


def message_of(error: BaseException) -> str:
    """The message of any error, as text that every encoder takes.

    Never fails: `__str__` of an error may raise, and its text may hold lone surrogates,
    which no message between processes can carry. They are escaped.
    """
    try:
        # A subclass of `str` may define anything.
        text = str.__getitem__(str(error), slice(MOST_CHARACTERS))
    except BaseException as problem:  # `__str__` may raise anything.
        if is_interrupt(problem):
            raise
        text = "its text is not available"
    return text.encode(errors="backslashreplace").decode()


def described(error: BaseException) -> str:
    """Class and message of any error; never fails."""
    return f"{type(error).__name__}: {message_of(error)}"


_MOST_KINDS = 1000


class Failures:
    """Remembers which kinds of errors were logged with a traceback.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str, int]] = set()
        self._lock = threading.Lock()

    def log(self, instance: str, about: object, error: BaseException) -> None:
        """Log an error of a consumer, with a traceback if it is the first of its kind.

        Errors of one consumer are of the same kind if they have the same class and were
        raised on the same line.

        Args:
            instance: the consumer's instance name.
            about: what it failed on, such as a key.
            error: the exception that it raised.

        """
        where = _raised_at(error.__traceback__)
        kind = (instance, type(error).__name__, *where)
        with self._lock:
            is_new = kind not in self._seen and len(self._seen) < _MOST_KINDS
            self._seen.add(kind) if is_new else None
        logger.error(
            "Consumer %s failed on %s: %s: %.500s",
            instance,
            about,
            type(error).__name__,
            message_of(error),
            exc_info=error if is_new else None,
        )


def _raised_at(traceback: TracebackType | None) -> tuple[str, int]:
    """The file and line of the innermost frame."""
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


FAILURES = Failures()
"""The instance of this process."""
