# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for hook functions, `/v1/hooks/...`, in vllm-lens' form."""

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm import envs
from vllm.entrypoints.serve.steering.authority import refusal
from vllm.entrypoints.serve.utils.json_object import engine_with, read_object
from vllm.interop.vllm_lens import hook_wire
from vllm.v1.hooks.errors import fail

router = APIRouter(prefix="/v1/hooks")


def attach_router(app: FastAPI, args: Namespace) -> None:
    """Mount the routes if hooks can be run, with a steering key or in dev mode.

    Must run after `attach_router` of steering, which reads the keys.
    """
    if not getattr(args, "vllm_lens_api", False):
        return
    if app.state.steering_keys or envs.VLLM_SERVER_DEV_MODE:
        app.include_router(router)


@router.post("/register")
async def register(request: Request) -> JSONResponse:
    """Run functions for all later requests."""

    async def work(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        if "hooks" not in body:
            raise fail("hooks: is needed, a list of hooks", "hooks", None)
        prefetch = body.get("prefetch_params")
        count = await engine.register_hooks(body["hooks"], prefetch)
        return {"status": "ok", "count": count}

    return await _answer(request, work, ("hooks", "prefetch_params"))


@router.post("/collect")
async def collect(request: Request) -> JSONResponse:
    """Return the values that registered functions saved, by request."""

    async def work(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        found = await engine.collect_hook_results()
        return {"results": {name: hook_wire.encode(one) for name, one in found.items()}}

    return await _answer(request, work)


@router.post("/prefetch")
async def prefetch(request: Request) -> JSONResponse:
    """Keep whole parameters in every worker."""

    async def work(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        params = await engine.prefetch_params(body.get("params"))
        return {"status": "ok", "params": params}

    return await _answer(request, work, ("params",))


def _add_clearing(path: str, method: str) -> None:
    """Add a route that calls a method of the engine without arguments."""

    async def work(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        await getattr(engine, method)()
        return {"status": "ok"}

    async def clear(request: Request) -> JSONResponse:
        return await _answer(request, work)

    router.add_api_route(path, clear, methods=["POST"], name=method)


_add_clearing("/clear", "clear_hooks")
_add_clearing("/clear_results", "clear_hook_results")
_add_clearing("/clear_prefetched", "clear_prefetched")


async def _answer(
    request: Request,
    work: Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]],
    names: tuple[str, ...] = (),
) -> JSONResponse:
    """Check the key and the body's fields, then run `work`."""
    if (refused := refusal(request)) is not None:
        return refused
    engine = engine_with(request, "register_hooks")
    body = await read_object(request, names, fail, may_be_empty=True)
    return JSONResponse(await work(engine, body))
