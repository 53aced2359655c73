# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for hook functions, `/v1/hooks/...`, in vllm-lens' form."""

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm import envs
from vllm.entrypoints.serve.steering.authority import KeyedRoute
from vllm.entrypoints.serve.utils.json_object import read_object
from vllm.interop.vllm_lens import hook_wire
from vllm.v1.hooks.errors import fail

router = APIRouter(prefix="/v1/hooks", route_class=KeyedRoute)


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
    engine, body = await _read(request, "hooks", "prefetch_params")
    if "hooks" not in body:
        raise fail("hooks: is needed, a list of hooks", "hooks", None)
    count = await engine.register_hooks(body["hooks"], body.get("prefetch_params"))
    return JSONResponse({"status": "ok", "count": count})


@router.post("/collect")
async def collect(request: Request) -> JSONResponse:
    """Return the values that registered functions saved, by request."""
    engine, _ = await _read(request)
    found = await engine.collect_hook_results()
    results = {name: hook_wire.encode(one) for name, one in found.items()}
    return JSONResponse({"results": results})


@router.post("/prefetch")
async def prefetch(request: Request) -> JSONResponse:
    """Keep whole parameters in every worker."""
    engine, body = await _read(request, "params")
    params = await engine.prefetch_params(body.get("params"))
    return JSONResponse({"status": "ok", "params": params})


def _add_clearing(path: str, method: str) -> None:
    """Add a route that calls a method of the engine without arguments."""

    async def clear(request: Request) -> JSONResponse:
        engine, _ = await _read(request)
        await getattr(engine, method)()
        return JSONResponse({"status": "ok"})

    router.add_api_route(path, clear, methods=["POST"], name=method)


_add_clearing("/clear", "clear_hooks")
_add_clearing("/clear_results", "clear_hook_results")
_add_clearing("/clear_prefetched", "clear_prefetched")


async def _read(request: Request, *names: str) -> tuple[Any, dict[str, Any]]:
    """The engine, and the body, which may have only the fields `names`."""
    engine = request.app.state.engine_client
    return engine, await read_object(request, names, fail, may_be_empty=True)
