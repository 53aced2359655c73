# SPDX-License-Identifier: Apache-2.0
"""Steering of a serving engine, by one of its API server processes or more.

What several of them must agree on is the engine core's: it keeps the global vectors,
merges changes one after another, and has the log of names. Where a front end is the
only one, it knows both without asking.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.residual.bounds import count_values
from vllm.v1.steering.core.refusals import refusal_in
from vllm.v1.steering.frontend.admission import FIELDS, REQUEST_FIELDS
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.frontend.frontend import (
    CLEARED,
    NO_CLAMPS,
    Change,
    Clamps,
    NoSteering,
    SteeringFrontend,
    open_frontend,
)
from vllm.v1.steering.frontend.name_sync import FollowedNames

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")

_LARGE = 1 << 12
"""Vectors with more numbers are parsed beside the event loop."""

_PARSING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steering-parse")


class AsyncSteeringControl:
    """As `SteeringControl`, for a serving engine."""

    def __init__(
        self, frontend: NoSteering, engines: Engines, several: bool = False
    ) -> None:
        """Know of nothing that was changed.

        Args:
            frontend: of this process.
            engines: behind it.
            several: whether other API server processes change steering, too.

        """
        self.frontend = frontend
        self._engines = engines
        self._one_at_a_time = asyncio.Lock()
        self._names: FollowedNames | None = None
        """Set where names are changed elsewhere."""
        if several and isinstance(frontend, SteeringFrontend):
            self._names = FollowedNames(frontend.modules, engines.owner)
            frontend.shared.unknown()

    async def prepare(self, params: Any) -> Any:
        """A request is about to be admitted: know the name that it gives.

        Args:
            params: of the request; pooling requests are not steered.

        Returns:
            The parameters; large vectors in them are parsed.

        Raises:
            SteeringValidationError: naming the parameter, the value, the remedy.

        """
        if not isinstance(params, SamplingParams):
            return params
        named = params.steering_name, params.steering_module_ref
        if self._names is not None and named != (None, None):
            await self._names.refresh()
        given = [getattr(params, name) for name in REQUEST_FIELDS.values()]
        frontend = self.frontend
        if not isinstance(frontend, SteeringFrontend) or not _is_large(given):
            return params
        return await _beside(frontend.admission.prepared, params)

    async def set(
        self,
        vectors: Any,
        prefill_vectors: Any,
        decode_vectors: Any,
        replace: bool,
        clamps: Clamps = NO_CLAMPS,
    ) -> dict[str, Any]:
        """Change the global vectors on every rank, or on none."""
        change = await _beside(
            self.frontend.change,
            vectors,
            prefill_vectors,
            decode_vectors,
            replace,
            clamps,
        )
        state = await self._change(change, replace)
        return {**state, "applied": change.applied}

    async def clear(self) -> dict[str, Any]:
        """Remove the global vectors."""
        self.frontend.check_enabled()
        return await self._change(CLEARED, True)

    async def _change(self, change: Change, replace: bool) -> dict[str, Any]:
        async with self._one_at_a_time:
            with self._changing(change, replace):
                return await self._engines.set(change.tiers, replace)

    @contextmanager
    def _changing(self, change: Change, replace: bool) -> Iterator[None]:
        if self._names is not None:
            yield  # Nothing is known here of what there was.
            return
        with self.frontend.shared.changing(change.tiers, replace):
            yield

    async def get(self) -> dict[str, Any]:
        """What is set, and how many slots are in use."""
        self.frontend.check_enabled()
        return await self._engines.get()

    async def register(
        self, name: Any, raw: Any, replace: bool, metadata: Any
    ) -> dict[str, Any]:
        """Add a named set; what was added."""
        if not isinstance(self.frontend, SteeringFrontend):
            return self.frontend.register(name, raw, replace, metadata)
        module, told = await _beside(self.frontend.prepare, name, raw, metadata)
        if self._names is None:
            self.frontend.modules.register(
                name, module.tiers, replace, module.provenance
            )
        else:
            await self._names.register(name, module, replace)
        return told

    async def unregister(self, name: Any) -> dict[str, Any]:
        """Remove a named set."""
        if self._names is None:
            return self.frontend.unregister(name)
        await self._names.unregister(name)
        return {"name": name}

    async def describe_modules(self) -> dict[str, Any]:
        """The named sets with the norms of their vectors."""
        self.frontend.check_enabled()
        if self._names is not None:
            await self._names.refresh()
        return self.frontend.describe_modules()


def _is_large(given: list[Any]) -> bool:
    return count_values(given, _LARGE) > _LARGE


async def _beside(work: Callable[..., T], *args: Any) -> T:
    """What a function returns, called beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_PARSING, work, *args)


def open_control(engine: "AsyncLLM") -> AsyncSteeringControl:
    """The steering of a serving engine, from one of its API server processes."""
    several = engine.vllm_config.parallel_config._api_process_count > 1
    engines = Engines(engine.engine_core)
    return AsyncSteeringControl(open_frontend(engine), engines, several)


async def raise_refusal(
    engine: "AsyncLLM", request_id: str, output: "RequestOutput", params: Any
) -> None:
    """Raise the error of a request that the engine core has refused to steer.

    Args:
        engine: of this front end.
        request_id: as the engine knows the request.
        output: tells of the refusal.
        params: as the client has sent them.

    Raises:
        SteeringValidationError: other vectors were set for all than were known here.

    """
    await engine.abort(request_id, internal=True)  # Other samples may be under way.
    engine.capture.refused(output)
    given = (name for name in FIELDS if getattr(params, name) is not None)
    raise refusal_in(output, next(given, "steering_vectors"))
