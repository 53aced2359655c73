# SPDX-License-Identifier: Apache-2.0
"""Passes results to a front end in the worker's own process by a call.

If the engine core runs in the process of its `LLM`, results are passed to the front end
by a call. Only the ZMQ channel keeps messages of one worker in order and limits them,
so rows for driver-side consumers, streamed rows and counters use the channel here too.
"""

from collections.abc import Callable
from typing import Any

_RECEIVERS: dict[str, Callable[[Any], None]] = {}
"""Handlers of this process's front ends, by address."""


def receive_at(address: str, handle: Callable[[Any], None]) -> None:
    """Call `handle` with messages of workers in this process.

    Args:
        address: address of the front end's inbox.
        handle: called on workers' threads, possibly concurrently.

    """
    _RECEIVERS[address] = handle


def stop_receiving(address: str) -> None:
    """Stop passing messages to the front end."""
    _RECEIVERS.pop(address, None)


def hand_over(address: str, message: Any) -> bool:
    """Give a message to the front end at `address`; False if it is elsewhere."""
    handle = _RECEIVERS.get(address)
    if handle is None:
        return False
    handle(message)
    return True
