# SPDX-License-Identifier: Apache-2.0
"""Steering of a serving engine by one or several API server processes.

The engine core owns the state on which several processes must agree: it keeps the
global vectors, merges changes one after another, and keeps the log of names. A front
end that is the only one knows both without asking.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.residual.bounds import count_values
from vllm.v1.steering.frontend.admission import REQUEST_FIELDS, request_fields
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.frontend.frontend import (
    CLEARED,
    Change,
    NoSteering,
    SteeringFrontend,
    open_frontend,
)
from vllm.v1.steering.frontend.modules import Module
from vllm.v1.steering.frontend.name_sync import FollowedNames
from vllm.v1.steering.spec.named import NamedFiles
from vllm.v1.steering.spec.sources import Runs

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")

_LARGE = 1 << 12
"""Vectors with more numbers than this are parsed outside the event loop."""

_PARSING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steering-parse")


class AsyncSteeringControl:
    """The counterpart of `SteeringControl` for a serving engine."""

    def __init__(self, frontend: NoSteering, engines: Engines) -> None:
        """Start with the state of the server's start.

        Args:
            frontend: the front end of this process.
            engines: the engine cores that it sends requests to.

        """
        self.frontend = frontend
        self._engines = engines
        self._one_at_a_time = asyncio.Lock()
        self._names: FollowedNames | None = None
        """Set if other processes change names too."""
        if isinstance(frontend, SteeringFrontend) and not frontend.admission.alone:
            self._names = FollowedNames(
                "steering", Module, frontend.modules.put, engines.owner
            )

    async def prepare(self, params: Any) -> Any:
        """Prepare a request for admission: fetch named modules, parse large vectors.

        Args:
            params: the request's parameters; pooling requests are not steered.

        Returns:
            The parameters, with large vectors in parsed form.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        if not isinstance(params, SamplingParams):
            return params
        given = {name: getattr(params, name) for name in request_fields()}
        may_name = given.keys() - set(REQUEST_FIELDS.values())
        if self._names is not None and any(given[one] is not None for one in may_name):
            await self._names.refresh()
        front, raw = self.frontend, list(given.values())
        if isinstance(front, SteeringFrontend) and count_values(raw, _LARGE) > _LARGE:
            return await _beside(front.admission.prepared, params)
        return params

    async def set(self, raw: Mapping[str, Any], replace: bool) -> dict[str, Any]:
        """Change the global vectors, given by field, on every rank or on none."""
        change = await _beside(self.frontend.change, raw, replace)
        state = await self._change(change, replace)
        return {**state, "applied": change.applied}

    async def clear(self) -> dict[str, Any]:
        """Remove the global vectors."""
        self.frontend.enabled()
        return await self._change(CLEARED, True)

    async def _change(self, change: Change, replace: bool) -> dict[str, Any]:
        async with self._one_at_a_time:
            with self.frontend.shared.changing(change.tiers, replace):
                return await self._engines.set(change.tiers, replace)

    async def get(self) -> dict[str, Any]:
        """The norms of the global vectors, and the number of slots in use."""
        self.frontend.enabled()
        return await self._engines.get()

    async def register(
        self, name: Any, raw: Any, replace: bool, metadata: Any
    ) -> dict[str, Any]:
        """Register a named module; returns its description."""
        frontend = self.frontend.enabled()
        module, description = await _beside(frontend.prepare, name, raw, metadata)
        if self._names is None:
            frontend.modules.register(name, module, replace)
        else:
            await self._names.register(
                name, module, lambda: frontend.modules.check_free(name, replace)
            )
        return description

    async def unregister(self, name: Any) -> dict[str, Any]:
        """Unregister a named module; returns `{"name": name}`."""
        modules = self.frontend.enabled().modules
        if self._names is None:
            modules.unregister(name)
        else:
            await self._names.unregister(name, lambda: modules.check_known(name))
        return {"name": name}

    async def describe_modules(self) -> dict[str, Any]:
        """The named modules with the norms of their vectors."""
        await self.module_names()
        return self.frontend.enabled().describe_modules()

    async def module_names(self) -> list[str]:
        """The names of all modules, those registered through other servers included."""
        modules = self.frontend.enabled().modules
        if self._names is not None:
            await self._names.refresh()
        return list(modules.all)


async def _beside(work: Callable[..., T], *args: Any) -> T:
    """Call a function on a worker thread, so that the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_PARSING, work, *args)


def open_control(
    engine: "AsyncLLM", named: NamedFiles, runs: Runs
) -> AsyncSteeringControl:
    """Create the steering control of a serving engine."""
    engines = Engines(engine.engine_core)
    return AsyncSteeringControl(open_frontend(engine, named, runs), engines)
