# SPDX-License-Identifier: Apache-2.0
"""What plug-ins do wrong, told to the operator: each kind once with its traceback."""

import threading
from types import TracebackType

from vllm.logger import init_logger

logger = init_logger(__name__)

_MOST_KINDS = 1000


class Failures:
    """Which kinds of errors were told of in full. Any thread may call."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str, int]] = set()
        self._lock = threading.Lock()

    def tell(self, instance: str, about: object, error: BaseException) -> None:
        """Log an error of a consumer; with its traceback where it is the first.

        Errors are of one kind if they are of one class and were raised at one line.

        Args:
            instance: the consumer's name.
            about: what it failed on, such as a key.
            error: what it raised.

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
            _text(error),
            exc_info=error if is_new else None,
        )


def _raised_at(traceback: TracebackType | None) -> tuple[str, int]:
    """The file and the line that an error comes from."""
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _text(error: BaseException) -> str:
    """What an error says, if it can say it."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def described(error: BaseException) -> str:
    """An error as a result tells of it."""
    return f"{type(error).__name__}: {_text(error)[:1000]}"


FAILURES = Failures()
"""Of this process."""
