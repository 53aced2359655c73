# SPDX-License-Identifier: Apache-2.0
"""Waits for the results of a request, on a thread or on an event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from vllm.logger import init_logger
from vllm.v1.capture.frontend.request_tracker import RequestTracker

logger = init_logger(__name__)

WAIT_SECONDS = 120.0
"""A wait ends if no result of any request has arrived for this many seconds."""

LOOK_SECONDS = 1.0
"""Seconds between checks, while waiting, that the engine is alive."""


class ResultWaiter:
    """Waits until the results of a request are complete or can no longer arrive."""

    def __init__(self, requests: RequestTracker, alive: Callable[[], bool]) -> None:
        """Wait for results of `requests` while `alive()` is true."""
        self._requests = requests
        self._alive = alive

    def wait(self, parent: str) -> None:
        """Wait for the results of a request, blocking this thread."""
        done = threading.Event()
        self._requests.when_complete(parent, done.set)
        began = monotonic()
        while self._may_complete(parent, began):
            done.wait(LOOK_SECONDS)

    async def wait_async(self, parent: str) -> None:
        """Wait for the results of a request, without blocking the event loop."""
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
        """Whether results are missing and may still arrive."""
        if self._requests.is_complete(parent):
            return False
        if not self._alive():
            self._requests.lose(
                parent, "the engine died before the consumer had answered"
            )
            return False
        # Results of other requests count as progress: with many requests and a slow
        # disk, each takes long.
        if monotonic() - max(began, self._requests.last_result) < WAIT_SECONDS:
            return True
        logger.warning(
            "Capture results of %s have not arrived within %.0f s", parent, WAIT_SECONDS
        )
        return False
