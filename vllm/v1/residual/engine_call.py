# SPDX-License-Identifier: Apache-2.0
"""Calls methods of the engine core, which is in this process or another."""

from typing import Any


def call_engine(client: Any, method: str, *args: Any) -> Any:
    """Call a method of the engine core, and wait for its result.

    Args:
        client: upstream's client of the engine core. The one for a core in the same
            process has no `call_utility`.
        method: name of the method.
        args: its arguments.

    """
    if hasattr(client, "call_utility"):
        return client.call_utility(method, *args)
    return getattr(client.engine_core, method)(*args)
