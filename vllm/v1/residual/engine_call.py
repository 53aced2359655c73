# SPDX-License-Identifier: Apache-2.0
"""Calls methods of the engine core, which is in this process or another; its end.

Upstream's front end reports a dead engine whenever its connection is closed while it
still waits for outputs. That is so at each stop in which the engine is given time, as
it is for captured rows.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient


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


async def call_engines(client: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every data-parallel engine; returns their results.

    `call_utility_async` of upstream's client returns the result of one.

    Args:
        client: upstream's client of an `AsyncLLM`.
        method: name of the method.
        args: its arguments.

    """
    call = client._call_utility_async
    engines = client.core_engines
    return await asyncio.gather(*(call(method, *args, engine=one) for one in engines))


def outputs_ended(logger: logging.Logger, client: "MPClient") -> None:
    """Log, within an `except` block, why no more outputs of the engine are read.

    Calls whose result would be among them fail: upstream's wait forever, and with them
    a server that ends.
    """
    if client.stopping:
        logger.info("[shutdown] AsyncLLM: no more outputs are read")
    else:
        logger.exception("AsyncLLM output_handler failed.")
    for waiting in client.utility_results.values():
        if not waiting.done():
            waiting.set_exception(EngineDeadError())
