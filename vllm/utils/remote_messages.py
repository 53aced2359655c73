# SPDX-License-Identifier: Apache-2.0
"""Waiting for a message of another node, or for the end of the engine.

Upstream waits on the socket alone. If the node that would send the message was killed,
the engine's thread waits for minutes, while the executor has shut down long ago.
"""

from math import inf
from time import monotonic
from typing import Any

LOOK_SECONDS = 1.0
"""Time between two looks whether the queue was shut down."""


def wait(queue: Any, timeout: float | None) -> None:
    """Wait until upstream's message queue has a message of another node.

    Args:
        queue: a `MessageQueue` that reads from another node.
        timeout: in seconds; None waits without limit.

    Raises:
        TimeoutError: there was no message in time.
        RuntimeError: the queue was shut down, as upstream says it of its other queues.

    """
    deadline = inf if timeout is None else monotonic() + timeout
    while True:
        seconds = min(max(deadline - monotonic(), 0.0), LOOK_SECONDS)
        if queue.remote_socket.poll(timeout=int(seconds * 1000)):
            return
        if queue.shutting_down:
            raise RuntimeError("cancelled")
        if monotonic() >= deadline:
            raise TimeoutError
