# SPDX-License-Identifier: Apache-2.0
"""Counts the rows in HTTP responses until these are sent or their client disconnects.

Fetched results belong to the caller. In a server they are held by a response, which
stays in memory until its client has read it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class ResponseScope:
    """The time from the receipt of an HTTP request to the end of its response.

    Used on the event loop's thread only.
    """

    def __init__(self) -> None:
        self._releases: list[Callable[[], object]] = []
        self._is_over = False

    @property
    def holds(self) -> bool:
        """Whether a release is pending: the response contains rows, or will."""
        return bool(self._releases)

    def until_the_end(self, release: Callable[[], object]) -> bool:
        """Call `release` at the end; False if the response is over."""
        if not self._is_over:
            self._releases.append(release)
        return not self._is_over

    def end(self) -> None:
        """Call the releases: the response was sent, or its client disconnected."""
        self._is_over = True
        while self._releases:
            self._releases.pop()()


_current: ContextVar[ResponseScope | None] = ContextVar("response", default=None)


@contextmanager
def response_scope() -> Iterator[ResponseScope]:
    """Enter a scope, which also applies to tasks that are started within it."""
    scope = ResponseScope()
    token = _current.set(scope)
    try:
        yield scope
    finally:
        scope.end()
        _current.reset(token)


def current_response() -> ResponseScope | None:
    """The scope of the current response; None outside of one."""
    return _current.get()


def when_response_ends(call: Callable[[], object]) -> bool:
    """Call `call` at the end of the current response; False if there is none."""
    scope = _current.get()
    return scope is not None and scope.until_the_end(call)
