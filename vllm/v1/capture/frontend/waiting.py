# SPDX-License-Identifier: Apache-2.0
"""Waiting for the results of a request, on a thread or on an event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from vllm.logger import init_logger
from vllm.v1.capture.frontend.request_tracker import RequestTracker

logger = init_logger(__name__)

WAIT_SECONDS = 120.0
"""A request stops waiting for its results once none has come for so long."""

LOOK_SECONDS = 1.0
"""So often one who waits looks whether the engine lives."""


class ResultWaiter:
    """Ends when the results are there, or will not come."""

    def __init__(self, requests: RequestTracker, alive: Callable[[], bool]) -> None:
        """Wait for results of `requests`, as long as the engine is `alive`."""
        self._requests = requests
        self._alive = alive

    def wait(self, parent: str) -> None:
        """Block this thread."""
        began, changed = monotonic(), self._requests.changed
        while self._may_complete(parent, began):
            with changed:
                changed.wait_for(
                    lambda: self._requests.is_complete(parent), LOOK_SECONDS
                )

    async def wait_async(self, parent: str) -> None:
        """The same without blocking the loop."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(done.set)

        self._requests.when_complete(parent, wake)
        began = monotonic()
        while self._may_complete(parent, began):
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), LOOK_SECONDS)

    def _may_complete(self, parent: str, began: float) -> bool:
        """Whether results are missing that are worth waiting for."""
        if self._requests.is_complete(parent):
            return False
        if not self._alive():
            self._requests.lose(
                parent, "the engine died before the consumer had answered"
            )
            return False
        # Others' results count: with many requests and a slow disk each takes long.
        if monotonic() - max(began, self._requests.last_result) < WAIT_SECONDS:
            return True
        logger.warning(
            "Capture results of %s have not come within %.0f s", parent, WAIT_SECONDS
        )
        return False
