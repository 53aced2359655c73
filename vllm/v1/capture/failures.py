# SPDX-License-Identifier: Apache-2.0
"""Logging of errors raised by plug-ins: one traceback for each kind of error."""

import threading
from types import TracebackType

from vllm.logger import init_logger
from vllm.v1.residual.plugin_errors import message_of

logger = init_logger(__name__)

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
