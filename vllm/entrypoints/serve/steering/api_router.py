# SPDX-License-Identifier: Apache-2.0
"""The routes under `/v1/steering`."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm import envs
from vllm.entrypoints.serve.steering import schema
from vllm.entrypoints.serve.steering.authority import (
    MUTATING,
    KeyedRoute,
    steering_keys,
)
from vllm.entrypoints.serve.utils.json_object import flag, read_object
from vllm.interop.reference_fork import named as gate_vectors
from vllm.logger import init_logger
from vllm.v1.steering.errors import UnknownModuleError, fail
from vllm.v1.steering.frontend.admission import set_fields
from vllm.v1.steering.frontend.async_frontend import AsyncSteeringControl

logger = init_logger(__name__)

reading = APIRouter(prefix="/v1/steering")
mutating = APIRouter(prefix="/v1/steering", route_class=KeyedRoute)
closed = APIRouter(include_in_schema=False)

Answer = dict[str, Any]


def attach_router(app: FastAPI, args: Namespace) -> None:
    """Mount the routes; mutating ones only with a steering key or in dev mode."""
    keys = steering_keys(args)
    app.state.steering_keys = keys
    app.include_router(reading)
    if keys or envs.VLLM_SERVER_DEV_MODE:
        app.include_router(mutating)
        return
    app.include_router(closed)
    if getattr(args, "enable_steering", False):
        logger.info(
            "Steering over HTTP is limited to requests: without --steering-api-key "
            "there are no routes that change the global vectors"
        )


async def not_open() -> None:
    """Tell the client how mutating routes are enabled."""
    raise HTTPException(
        HTTPStatus.NOT_FOUND,
        "this server has no routes that change steering, readout modules or hooks: "
        "start it with --enable-steering and --steering-api-key KEY (or "
        "VLLM_STEERING_API_KEY), or with VLLM_SERVER_DEV_MODE=1, which lets every "
        "client change steering; a request can use vectors of its own in "
        "steering_vectors",
    )


for _path in sorted(MUTATING):
    closed.add_api_route(_path, not_open, methods=["POST"])


@reading.get("")
async def get_steering(request: Request) -> JSONResponse:
    """The global vectors, and how many configurations are in use."""
    answer = await _control(request).get()
    return JSONResponse(_with_layers(answer))


@reading.get("/layers")
async def get_layers(request: Request) -> JSONResponse:
    """The layers and hook points that can be steered, over all ranks."""
    return JSONResponse(_control(request).frontend.enabled().describe_model())


@reading.get("/modules")
async def get_modules(request: Request) -> JSONResponse:
    """The named modules."""
    control = _control(request)
    modules = await control.describe_modules()
    return JSONResponse({"modules": modules, "count": len(modules)})


@reading.get("/dynamic")
async def get_dynamic(request: Request) -> JSONResponse:
    """What consumers that run within the step have set, and how long they take."""
    _control(request).frontend.enabled()
    core = request.app.state.engine_client.engine_core
    workers = await core.call_utility_async("dynamic_steering")
    consistent = len({one.get("action_checksum") for one in workers}) == 1
    return JSONResponse({"workers": workers, "determinism": {"consistent": consistent}})


@reading.get("/vectors")
async def get_vectors(request: Request) -> JSONResponse:
    """Names of the vectors that gates of requests may refer to, by kind."""
    names = await gate_vectors.names(_control(request))
    return JSONResponse(
        {"vectors": names, "count": sum(len(own) for own in names.values())}
    )


@mutating.post("/vectors/register", openapi_extra=schema.REGISTER_VECTOR)
async def register_vector(request: Request) -> JSONResponse:
    """Register, or replace, vectors that gates of requests refer to by name."""
    control, body = await _read(request, "name", "kind", "packed")
    name, kind = body.get("name"), body.get("kind")
    names = await gate_vectors.register(control, name, kind, body.get("packed"))
    return _ok({"name": name, "kind": kind, "vectors": names})


@mutating.post("/vectors/unregister", openapi_extra=schema.UNREGISTER_VECTOR)
async def unregister_vector(request: Request) -> JSONResponse:
    """Unregister vectors; requests in flight keep them."""
    control, body = await _read(request, "name", "kind")
    name, kind = body.get("name"), body.get("kind")
    with _unknown_is_404():
        names = await gate_vectors.unregister(control, name, kind)
    return _ok({"name": name, "kind": kind, "vectors": names})


@mutating.post("/set", openapi_extra=schema.SET)
async def set_steering(request: Request) -> JSONResponse:
    """Set global vectors, on all ranks or on none."""
    names = set_fields()
    control, body = await _read(request, *names, "replace")
    vectors = {name: body.get(name) for name in names}
    answer = await control.set(vectors, flag(body, "replace", fail))
    applied = answer["applied"]
    return _ok(
        {  # The first two as in an earlier public fork.
            "hook_points": sorted({one["hook"] for one in applied}),
            "layers_updated": sorted({one["layer"] for one in applied}),
            **_with_layers(answer),
        }
    )


@mutating.post("/clear", openapi_extra=schema.CLEAR)
async def clear_steering(request: Request) -> JSONResponse:
    """Remove all global vectors; vectors of requests are not affected."""
    control, _ = await _read(request)
    return _ok(_with_layers(await control.clear()))


@mutating.post("/modules/register", openapi_extra=schema.REGISTER)
async def register_module(request: Request) -> JSONResponse:
    """Register a named module of vectors."""
    names = set_fields()
    control, body = await _read(request, "name", *names, "metadata", "replace")
    control.frontend.enabled()
    vectors = {name: body[name] for name in names if body.get(name) is not None}
    answer = await control.register(
        body.get("name"), vectors, flag(body, "replace", fail), body.get("metadata")
    )
    return _ok(answer)


@mutating.post("/modules/unregister", openapi_extra=schema.UNREGISTER)
async def unregister_module(request: Request) -> JSONResponse:
    """Unregister a named module; requests in flight keep its vectors."""
    control, body = await _read(request, "name")
    with _unknown_is_404():
        return _ok(await control.unregister(body.get("name")))


@contextmanager
def _unknown_is_404() -> Iterator[None]:
    """Answer 404 if the name to be removed does not exist."""
    try:
        yield
    except UnknownModuleError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, error.args[0]) from None


def _with_layers(answer: Answer) -> Answer:
    """The state of steering, with what acts at each layer."""
    return {**answer, "active_layers": _by_layer(answer)}


def _by_layer(answer: Answer) -> dict[str, dict[str, dict[str, Any]]]:
    """`{layer: {hook: {"norm", "prefill_norm", "decode_norm"}}}`, as far as present."""
    names = {"vectors": "norm", "prefill_vectors": "prefill_norm"}
    names["decode_vectors"] = "decode_norm"
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for tier, name in names.items():
        for hook, layers in answer.get(tier, {}).items():
            for layer, one in layers.items():
                if "norm" in one:
                    found.setdefault(layer, {}).setdefault(hook, {})[name] = one["norm"]
    return found


async def _read(request: Request, *names: str) -> tuple[AsyncSteeringControl, Answer]:
    """The body, which may have only the fields `names`, and what it is to change."""
    body = await read_object(request, names, fail, may_be_empty=True)
    return _control(request), body


def _ok(answer: Answer) -> JSONResponse:
    return JSONResponse({"status": "ok", **answer})


def _control(request: Request) -> AsyncSteeringControl:
    control: AsyncSteeringControl = request.app.state.engine_client.steering
    return control
