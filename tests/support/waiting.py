# SPDX-License-Identifier: Apache-2.0
"""Waits for other threads and processes."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any


def until(
    holds: Callable[[], Any], seconds: float = 60.0, why: str = "it does not happen"
) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not within this time; the message is `why`.

    """
    deadline = monotonic() + seconds
    while not holds():
        assert monotonic() < deadline, why
        sleep(0.02)
