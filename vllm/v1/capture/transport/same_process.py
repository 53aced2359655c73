# SPDX-License-Identifier: Apache-2.0
"""Results for a front end in the worker's own process, which need not be sent.

An engine whose core runs in the process of its `LLM` gives results to the front end by
a call. Only the ZMQ channel keeps messages of one worker in order and bounds them, so
rows for driver-side consumers, streamed rows and counters go through it here too.
"""

from collections.abc import Callable
from typing import Any

_RECEIVERS: dict[str, Callable[[Any], None]] = {}
"""The front ends of this process, by address."""


def receive_at(address: str, handle: Callable[[Any], None]) -> None:
    """Call `handle` with what workers of this process hand over.

    Args:
        address: of the front end's inbox.
        handle: called on a worker's thread, by several at once.

    """
    _RECEIVERS[address] = handle


def stop_receiving(address: str) -> None:
    """Nothing is handed over from now on."""
    _RECEIVERS.pop(address, None)


def hand_over(address: str, message: Any) -> bool:
    """Give a message to the front end at `address`; False if it is elsewhere."""
    handle = _RECEIVERS.get(address)
    if handle is None:
        return False
    handle(message)
    return True
