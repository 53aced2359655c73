# SPDX-License-Identifier: Apache-2.0
"""The routes under `/v1/capture`."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from vllm.entrypoints.serve.capture.answers import answer
from vllm.v1.capture.consumers.memory.api import drop as drop_kept
from vllm.v1.capture.consumers.memory.api import keepers, read
from vllm.v1.capture.consumers.memory.store import selected
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.disabled import NoCapture
from vllm.v1.capture.frontend.http import deferred
from vllm.v1.capture.results import request_key
from vllm.v1.capture.transport.bodies import form_for
from vllm.v1.capture.transport.handouts import HANDOUTS, KEPT_SECONDS
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.bounds import cut, shown
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.tap import HOOK_NAMES, hook_name

router = APIRouter(prefix="/v1/capture")


def attach_router(app: FastAPI) -> None:
    """Mount the routes."""
    app.include_router(router)


@router.get("")
async def get_capture(request: Request) -> JSONResponse:
    """Consumers, limits and counters of captured rows, and the names that are kept.

    Workers report their counters about once a second.
    """
    capture = _capture(request)
    await capture.listen(request.app.state.engine_client.engine_core)
    kept = {name: one.store.describe() for name, one in keepers(capture).items()}
    return JSONResponse({**capture.describe(), "kept": kept})


def _refuse_unknown_query(request: Request) -> None:
    """Refuse what upstream's framework ignores: `layer=3` would select every layer."""
    known = sorted(one.alias for one in request.scope["route"].dependant.query_params)
    for name in request.query_params.keys() - set(known):
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"{shown(name)}: the query has no such key; its keys are {known}",
        )


_KNOWN_QUERY = [Depends(_refuse_unknown_query)]


class KeptRows(BaseModel):
    """The rows of a name, in the form of a completion's results."""

    object: Literal["capture.rows"] = "capture.rows"
    name: str
    requests: list[dict[str, Any]]
    capture_results: dict[str, Any]
    """By `request id/sample index`."""


@router.get("/memory", dependencies=_KNOWN_QUERY)
async def list_kept(request: Request, instance: str | None = None) -> JSONResponse:
    """The names under which the consumer `memory` keeps rows, and how much."""
    return JSONResponse(_refusing(read, _capture(request), None, instance))


@router.get("/memory/{name}", dependencies=_KNOWN_QUERY)
async def get_kept(
    request: Request,
    name: str,
    instance: str | None = None,
    request_id: str | None = None,
    layers: str | None = None,
    hook: str | None = None,
    start: int = 0,
    stop: int = OPEN_END,
    transport: Literal["http", "shm"] = "http",
    drop: bool = False,
) -> Response:
    """The rows of a name, or the part that the query selects.

    The form is what `Accept` says: JSON or safetensors.
    """
    form_for(request.headers.get("accept", ""))  # Before rows are read and dropped.
    capture = _capture(request)
    chosen, point = _layers(layers), _hook(hook)
    found = {}
    kept = _refusing(read, capture, name, instance)
    for one in kept:
        if request_id in (None, one.request_id):
            rows = selected(one.rows, chosen, point, start, stop)
            rows.transport = transport
            result = CaptureResult(request_key(one.request_id), "ok", payload=rows)
            found[f"{one.request_id}/{one.sample_index}"] = (one, result)
    if not found:
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            f"request_id={request_id!r}: {name!r} has no such request",
        )
    response = KeptRows(
        name=name,
        requests=[
            {
                "request_id": one.request_id,
                "sample_index": one.sample_index,
                "num_prompt_tokens": one.num_prompt_tokens,
            }
            for one, _ in found.values()
        ],
        capture_results=deferred({key: result for key, (_, result) in found.items()}),
    )
    answered = await answer(response, request, None)
    if drop:
        _refusing(drop_kept, capture, name, instance)
    return answered


@router.delete("/memory/{name}", dependencies=_KNOWN_QUERY)
async def delete_kept(
    request: Request, name: str, instance: str | None = None
) -> JSONResponse:
    """Forget the rows of a name; answers that are being sent stay whole."""
    dropped = _refusing(drop_kept, _capture(request), name, instance)
    return JSONResponse({"dropped": name, **dropped})


def _refusing(
    work: Callable[..., Any], capture: NoCapture, name: str | None, instance: str | None
) -> Any:
    try:
        return work(capture, name, instance)
    except CaptureValidationError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, str(error)) from error


def _layers(text: str | None) -> list[int] | None:
    """`"0,2"` as `[0, 2]`."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"layers={cut(text or '')!r}: give layer numbers with commas, as in 0,2",
        ) from None


def _hook(text: str | None) -> str | None:
    """The hook point of a name, or of another system's name."""
    found = None if text is None else hook_name(text)
    if text is not None and found not in HOOK_NAMES:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"hook={shown(text)}: there is no such hook point; use one of "
            f"{list(HOOK_NAMES)}",
        )
    return found


def _capture(request: Request) -> NoCapture:
    found: NoCapture = request.app.state.engine_client.capture
    return found


@router.delete("/shm/{token}")
def free_answer(token: str) -> JSONResponse:
    """Free an answer in shared memory; existing mappings of the client stay valid.

    On a thread: the kernel clears up what the client has not mapped.
    """
    if not HANDOUTS.free(token):
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            f"there is no answer {token!r}: it was freed, or is older than "
            f"{KEPT_SECONDS:.0f} s, or another API server has it",
        )
    return JSONResponse({"freed": token})
