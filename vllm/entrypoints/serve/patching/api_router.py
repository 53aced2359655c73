# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/patch_sweep`, whose requests run in the server, and dropping of runs."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm.entrypoints.serve.patching import schema
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.json_object import read_object
from vllm.exceptions import VLLMValidationError
from vllm.patching.engine import drop_run, engine_of, holding, params_of, reply_of
from vllm.patching.planning import Sweep, plan_of
from vllm.patching.questions import Ask, Reply
from vllm.patching.study import Done, Study
from vllm.sampling_params import RequestOutputKind
from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@asynccontextmanager
async def opened(engine: "AsyncLLM", sweep: Sweep, keep: bool) -> AsyncIterator[Study]:
    """Plan a sweep, and run what comes before its grid.

    Args:
        engine: the serving engine.
        sweep: what is asked.
        keep: whether the run that is captured for the sweep stays.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    processor = engine.input_processor
    found = engine_of(engine.vllm_config, engine.get_tokenizer, processor)
    plan = await asyncio.to_thread(plan_of, sweep, found)
    study = Study(plan)
    with holding(found.capture, plan, keep):
        for asks in study.rounds():
            replies = (_answer(engine, ask) for ask in asks)
            study.replies = await asyncio.gather(*replies)
        yield study


async def cells(engine: "AsyncLLM", study: Study) -> AsyncGenerator[Done, None]:
    """Run the grid; yields each cell once its value is known.

    So many requests are in flight that no slot of steering is empty, and not more, as
    other steered requests wait behind them. They end if the iteration does.
    """
    at_once = 2 * engine.vllm_config.steering_config.max_configs
    tasks: dict[asyncio.Task[Reply], int] = {}
    started = 0
    try:
        for done in study.filled:
            yield done
        while tasks or started < len(study.asks):
            while started < len(study.asks) and len(tasks) < at_once:
                task = asyncio.create_task(_answer(engine, study.asks[started]))
                tasks[task] = started
                started += 1
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                for done in study.take(tasks.pop(task), _reply_of(task)):
                    yield done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reply_of(task: "asyncio.Task[Reply]") -> Reply | Exception:
    """A request's reply, or why it alone has none."""
    error = task.exception()
    if isinstance(error, (VLLMValidationError, RuntimeError)):
        return error
    return task.result()


async def _answer(engine: "AsyncLLM", ask: Ask) -> Reply:
    params = params_of(ask)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    prompt: Any = {"prompt_token_ids": list(ask.token_ids)}
    outputs = engine.generate(prompt, params, f"patch-{uuid4().hex}")
    last = [output async for output in outputs][-1]
    return reply_of(ask, last)


router = APIRouter(prefix="/v1")


def attach_router(app: FastAPI) -> None:
    """Mount the routes."""
    app.include_router(router)


@router.post("/patch_sweep")
async def patch_sweep(request: Request) -> Response:
    """Patch a prompt at one place after another: JSON, or a stream of cells."""
    body = await read_object(request, schema.FIELDS, fail)
    models, model = request.app.state.openai_serving_models, body.get("model")
    if model is not None and not models.is_base_model(model):
        raise fail("model: only the server's own model is patched", "model", model)
    answer: Response | None = await _answered(body, raw_request=request)
    return Response() if answer is None else answer  # The client has gone.


@with_cancellation
async def _answered(body: dict[str, Any], raw_request: Request) -> Response:
    engine = raw_request.app.state.engine_client
    sweep, keep = schema.sweep_of(body), bool(body.get("keep_source"))
    async with AsyncExitStack() as stack:
        study = await stack.enter_async_context(opened(engine, sweep, keep))
        if body.get("stream"):
            # Begun here, so that it ends the sweep also if the response is never sent.
            events = _events(engine, study, stack.pop_all())
            whole = _begun(await anext(events), events)
            return StreamingResponse(whole, media_type="text/event-stream")
        async for _ in cells(engine, study):
            pass
        return JSONResponse(schema.summary_of(study))


async def _events(
    engine: Any, study: Study, ending: AsyncExitStack
) -> AsyncGenerator[str, None]:
    """The events of a sweep; errors after the first cell end the stream."""
    async with ending:
        yield _event(schema.start_of(study))
        found = cells(engine, study)
        try:
            async for done in found:
                yield _event(schema.cell_of(study, done))
        finally:
            await found.aclose()
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
