# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/patch_sweep` and `DELETE /v1/patch_source/{run}`."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm.entrypoints.serve.patching import schema
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.json_object import read_object
from vllm.patching import serving
from vllm.patching.engine import drop_run
from vllm.patching.study import Study
from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import fail

router = APIRouter(prefix="/v1")


def attach_router(app: FastAPI) -> None:
    """Mount the routes."""
    app.include_router(router)


@router.post("/patch_sweep")
async def patch_sweep(request: Request) -> Response:
    """Patch a prompt at one place after another: JSON, or a stream of cells."""
    body = await read_object(request, schema.FIELDS, fail)
    models = getattr(request.app.state, "openai_serving_models", None)
    if models is None:
        raise HTTPException(HTTPStatus.NOT_IMPLEMENTED, "this server has no engine")
    model = body.get("model")
    if model is not None and not models.is_base_model(model):
        raise fail("model: only the server's own model is patched", "model", model)
    answer: Response | None = await _answered(body, raw_request=request)
    return Response() if answer is None else answer  # The client has gone.


@with_cancellation
async def _answered(body: dict[str, Any], raw_request: Request) -> Response:
    engine = raw_request.app.state.engine_client
    sweep, keep = schema.sweep_of(body), bool(body.get("keep_source"))
    async with AsyncExitStack() as stack:
        study = await stack.enter_async_context(serving.opened(engine, sweep, keep))
        if body.get("stream"):
            # Begun here, so that it ends the sweep also if the response is never sent.
            events = _events(engine, study, stack.pop_all())
            whole = _begun(await anext(events), events)
            return StreamingResponse(whole, media_type="text/event-stream")
        async for _ in serving.cells(engine, study):
            pass
        return JSONResponse(schema.summary_of(study))


async def _events(
    engine: Any, study: Study, ending: AsyncExitStack
) -> AsyncGenerator[str, None]:
    """The events of a sweep; errors after the first cell end the stream."""
    async with ending:
        yield _event(schema.start_of(study))
        cells = serving.cells(engine, study)
        try:
            async for done in cells:
                yield _event(schema.cell_of(study, done))
        finally:
            await cells.aclose()
        yield _event({"type": "summary", **schema.summary_of(study)})
        yield "data: [DONE]\n\n"


async def _begun(first: str, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, allow_nan=False)}\n\n"


@router.delete("/patch_source/{run}")
async def drop_source(request: Request, run: str) -> JSONResponse:
    """Drop a kept run; sweeps that use it lack the cells that are left."""
    if not drop_run(request.app.state.engine_client.capture, run):
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"no run is kept under the name {shown(run)}"
        )
    return JSONResponse({"dropped": True})
