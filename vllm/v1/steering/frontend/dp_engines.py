# SPDX-License-Identifier: Apache-2.0
"""The engine cores behind a front end: one, or one per data-parallel rank.

A change of the global vectors holds on all of them or on none. The first engine is
the owner: every change begins there, so that those of several front ends are made one
after another, in the same order everywhere.
"""

import asyncio
from typing import Any
from uuid import uuid4

from vllm.logger import init_logger
from vllm.v1.steering.errors import SteeringChangeError, as_refused
from vllm.v1.steering.plan import SteeringTiers

logger = init_logger(__name__)

PATIENCE_SECONDS = 60.0
"""A change waits so long for another one."""

_PAUSE_SECONDS = 0.02


class Engines:
    """Calls methods of the engine cores. Event loop only."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def owner(self, method: str, *args: Any) -> Any:
        """What the first engine answers."""
        (found,) = await self._ask(self._client.core_engines[:1], method, args)
        return _answer(found)

    async def set(self, change: SteeringTiers, replace: bool) -> dict[str, Any]:
        """Change the global vectors on every rank of every engine, or on none.

        Raises:
            SteeringValidationError: it is more than a request under way can bear.
            SteeringChangeError: a rank could not take it.

        """
        if len(self._client.core_engines) == 1:
            found: dict[str, Any] = await self.owner("set_steering", change, replace)
            return found
        # Once begun it is brought to its end, whoever waits for it.
        return await asyncio.shield(self._set_on_all(change, replace))

    async def get(self) -> dict[str, Any]:
        """What is set, and how much is in use at the engine with most of it."""
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
            assert all(map(_answer, held)), "the owner lets one change through"
            answers = await self._ask([first, *others], "commit_steering", (holder,))
            state = _together([_answer(one) for one in answers])
            done = True
        finally:
            # The owner last: the next change then finds the others free.
            for some in (others, [first]):
                await self._release(some, holder, undo=not done)
        return state

    async def _hold_first(
        self, holder: str, change: SteeringTiers, replace: bool
    ) -> None:
        """Wait until no other change is under way."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while not await self.owner("hold_steering", holder, change, replace):
            if loop.time() > deadline:
                raise SteeringChangeError(
                    "another change of what is set for all has been under way for "
                    f"{PATIENCE_SECONDS:.0f} s; nothing was changed, try again"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _release(self, engines: list[bytes], holder: str, undo: bool) -> None:
        answers = await self._ask(engines, "release_steering", (holder, undo))
        failures = [one for one in answers if isinstance(one, Exception)]
        if failures:
            raise SteeringChangeError(
                "data-parallel engines differ in what is set for all, as one could "
                f"not take back a change that another refused: {failures[0]}. Clear "
                "it (POST /v1/steering/clear), then set it again"
            )

    async def _ask(
        self, engines: list[bytes], method: str, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        """What each of some engines answers, or the error."""
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
    """One answer for engines that have the same set."""
    state = dict(states[0])
    for name in ("configs_in_use", "rows_in_use"):
        state[name] = max(one[name] for one in states)
    counts: dict[str, int] = {}
    for one in states:
        for reason, count in one["eager_steps"].items():
            counts[reason] = counts.get(reason, 0) + count
    return {**state, "eager_steps": counts}
