# SPDX-License-Identifier: Apache-2.0
"""The engine cores that a front end serves: one, or one per data-parallel rank.

A change of the global vectors is applied on all engines or on none. The first engine is
the owner: every change begins there, so that changes by several front ends are made one
after another, in the same order on every engine.
"""

import asyncio
from typing import Any
from uuid import uuid4

from vllm.logger import init_logger
from vllm.v1.steering.errors import SteeringChangeError, as_refused
from vllm.v1.steering.plan import SteeringTiers

logger = init_logger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a change waits for another change to finish."""

_PAUSE_SECONDS = 0.02


class Engines:
    """Calls methods of the engine cores. Used on the event loop only."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def owner(self, method: str, *args: Any) -> Any:
        """Call a method of the first engine; returns its result."""
        (found,) = await self._ask(self._client.core_engines[:1], method, args)
        return _answer(found)

    async def set(self, change: SteeringTiers, replace: bool) -> dict[str, Any]:
        """Change the global vectors on every rank of every engine, or on none.

        Raises:
            SteeringValidationError: the sum with the vectors of a request in flight
                overflows the model's dtype.
            SteeringChangeError: a rank failed to apply the change.

        """
        if len(self._client.core_engines) == 1:
            found: dict[str, Any] = await self.owner("set_steering", change, replace)
            return found
        # A change that has begun is completed, even if its caller is cancelled.
        return await asyncio.shield(self._set_on_all(change, replace))

    async def get(self) -> dict[str, Any]:
        """The global vectors, and the usage of the engine that uses most slots."""
        engines = self._client.core_engines
        answers = await self._ask(engines, "get_steering")
        return _together([_answer(one) for one in answers])

    async def _set_on_all(self, change: SteeringTiers, replace: bool) -> dict[str, Any]:
        first, *others = self._client.core_engines
        holder = uuid4().hex
        await self._hold_first(holder, change, replace)
        done = False
        try:
            held = await self._ask(others, "hold_steering", (holder, change, replace))
            assert all(map(_answer, held)), "the owner admits one change at a time"
            answers = await self._ask([first, *others], "commit_steering", (holder,))
            state = _together([_answer(one) for one in answers])
            done = True
        finally:
            # The owner is released last: the next change then finds the others free.
            for some in (others, [first]):
                await self._release(some, holder, undo=not done)
        return state

    async def _hold_first(
        self, holder: str, change: SteeringTiers, replace: bool
    ) -> None:
        """Hold the change on the owner, after any other change has finished."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while not await self.owner("hold_steering", holder, change, replace):
            if loop.time() > deadline:
                raise SteeringChangeError(
                    "another change of the global vectors has been in progress for "
                    f"{PATIENCE_SECONDS:.0f} s; nothing was changed, try again"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _release(self, engines: list[bytes], holder: str, undo: bool) -> None:
        answers = await self._ask(engines, "release_steering", (holder, undo))
        failures = [one for one in answers if isinstance(one, Exception)]
        if failures:
            raise SteeringChangeError(
                "data-parallel engines have different global vectors, as one could "
                f"not undo a change that another one refused: {failures[0]}. Clear "
                "them (POST /v1/steering/clear), then set them again"
            )

    async def _ask(
        self, engines: list[bytes], method: str, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        """Call a method of some engines; each engine's result or exception."""
        call = self._client._call_utility_async
        calls = [call(method, *args, engine=engine) for engine in engines]
        return await asyncio.gather(*calls, return_exceptions=True)


def _answer(found: Any) -> Any:
    if isinstance(found, BaseException):
        if isinstance(found, Exception):
            raise as_refused(found) from found
        raise found
    return found


def _together(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of engines that have the same global vectors."""
    state = dict(states[0])
    for name in ("configs_in_use", "rows_in_use"):
        state[name] = max(one[name] for one in states)
    return state
