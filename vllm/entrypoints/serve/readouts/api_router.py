# SPDX-License-Identifier: Apache-2.0
"""The routes under `/v1/readouts` and `/v1/sae`."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm import envs
from vllm.entrypoints.serve.steering.authority import KeyedRoute
from vllm.entrypoints.serve.utils.json_object import flag, read_object
from vllm.v1.readouts.errors import fail

reading = APIRouter(prefix="/v1")
mutating = APIRouter(prefix="/v1", route_class=KeyedRoute)

Answer = dict[str, Any]

FIELDS = ("name", "path", "layer", "hook", "replace")


def attach_router(app: FastAPI) -> None:
    """Mount the routes; mutating ones only with a steering key or in dev mode.

    Must run after `attach_router` of steering, which reads the keys.
    """
    app.include_router(reading)
    if app.state.steering_keys or envs.VLLM_SERVER_DEV_MODE:
        app.include_router(mutating)


@reading.get("/readouts")
async def get_readouts(request: Request) -> JSONResponse:
    """Modules, limits, and counters by kind of readout."""
    return JSONResponse(await request.app.state.engine_client.get_readouts())


@reading.get("/readouts/modules")
async def get_modules(request: Request) -> JSONResponse:
    """The registered probes and translators."""
    return JSONResponse(await _modules(request, saes=False))


@reading.get("/sae")
async def get_saes(request: Request) -> JSONResponse:
    """The registered sparse autoencoders."""
    return JSONResponse(await _modules(request, saes=True))


async def _modules(request: Request, saes: bool) -> Answer:
    found = (await request.app.state.engine_client.get_readouts())["modules"]
    own = {name: one for name, one in found.items() if (one["kind"] == "sae") == saes}
    return {"modules": own, "count": len(own)}


@mutating.post("/readouts/modules/register")
@mutating.post("/sae/register")
async def register(request: Request) -> JSONResponse:
    """Register a probe, a translator or an SAE from a file on the server."""
    body = await read_object(request, FIELDS, fail)
    replace = flag(body, "replace", fail)
    described = await request.app.state.engine_client.register_readout_module(
        body.get("name"),
        body.get("path"),
        body.get("layer"),
        body.get("hook"),
        replace,
        _kind(request),
    )
    return JSONResponse({"status": "ok", "name": body["name"], **described})


@mutating.post("/readouts/modules/unregister")
@mutating.post("/sae/unregister")
async def unregister(request: Request) -> JSONResponse:
    """Unregister a probe, a translator or an SAE."""
    body = await read_object(request, ("name",), fail)
    await request.app.state.engine_client.unregister_readout_module(
        body.get("name"), _kind(request)
    )
    return JSONResponse({"status": "ok", "name": body["name"]})


def _kind(request: Request) -> str:
    """What the route is for."""
    return "sae" if "/sae/" in request.url.path else "module"
