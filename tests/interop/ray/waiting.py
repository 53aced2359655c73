# SPDX-License-Identifier: Apache-2.0
"""Waits for other processes."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

PATIENCE_SECONDS = 600


def until(reached: Callable[[], Any]) -> None:
    deadline = monotonic() + PATIENCE_SECONDS
    while not reached() and monotonic() < deadline:
        sleep(0.02)
