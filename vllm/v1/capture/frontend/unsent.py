# SPDX-License-Identifier: Apache-2.0
"""Rows that a response carries count until it is sent, or its client is gone.

When a request's results are fetched, its rows are its caller's. A server's caller is a
response, which lies in the server's memory for as long as its client does not read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar


class ResponseScope:
    """From the receipt of an HTTP request to the end of its response.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._releases: list[Callable[[], object]] = []
        self._is_over = False

    @property
    def holds(self) -> bool:
        """Whether the response carries rows, or will."""
        return bool(self._releases)

    def until_the_end(self, release: Callable[[], object]) -> bool:
        """Call `release` at the end; False if the response is over."""
        if not self._is_over:
            self._releases.append(release)
        return not self._is_over

    def end(self) -> None:
        """The response is sent, or nobody waits for it any more."""
        self._is_over = True
        while self._releases:
            self._releases.pop()()


_current: ContextVar[ResponseScope | None] = ContextVar("response", default=None)


@contextmanager
def response_scope() -> Iterator[ResponseScope]:
    """The scope of what is run within, tasks that it starts included."""
    scope = ResponseScope()
    token = _current.set(scope)
    try:
        yield scope
    finally:
        scope.end()
        _current.reset(token)


def when_response_ends(call: Callable[[], object]) -> bool:
    """Call it then; False if the caller makes no response, or its response is over."""
    scope = _current.get()
    return scope is not None and scope.until_the_end(call)


class UnsentRows:
    """Bytes of rows that were fetched for responses which are not sent yet."""

    def __init__(self) -> None:
        """None."""
        self._sizes: dict[object, Mapping[str, int]] = {}

    def hold(self, sizes: Mapping[str, int]) -> None:
        """Count bytes, per instance, until the response of the caller is sent.

        A caller that makes no response has its rows, and they count no longer.
        """
        key = object()
        if sizes and when_response_ends(lambda: self._sizes.pop(key, None)):
            self._sizes[key] = sizes

    def bytes_for(self, instance: str) -> int:
        """What is held at an instance. Any thread may ask."""
        return sum(sizes.get(instance, 0) for sizes in list(self._sizes.values()))
