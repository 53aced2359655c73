# SPDX-License-Identifier: Apache-2.0
"""interp-engine's routes under `/v1` and, where names may collide, `/v1/interp-engine`.

They follow the server's key, as all of `/v1` does. A mistake is HTTP 422 with `detail`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from vllm.entrypoints.serve.capture.answers import made_on_threads
from vllm.entrypoints.serve.interp_engine import schema
from vllm.entrypoints.serve.interp_engine.answers import (
    description,
    finish_of,
    lens_step,
    token_step,
    tokenized,
)
from vllm.entrypoints.serve.interp_engine.room import (
    Room,
    check_directions,
    check_numbers,
)
from vllm.exceptions import VLLMClientError
from vllm.interop.interp_engine.model import ServedModel
from vllm.interop.interp_engine.types import DirectionSet, LensSpec
from vllm.interop.interp_engine.wire import decode_tensor, encoded_pieces
from vllm.logger import init_logger
from vllm.v1.residual.bounds import cut
from vllm.v1.residual.plugin_errors import described

logger = init_logger(__name__)

Answer = dict[str, Any]
Lines = AsyncIterator[Answer]


MOST_ERRORS = 16
"""Errors of one body that a response lists."""


def _refused(detail: Any) -> Response:
    return JSONResponse({"detail": detail}, HTTPStatus.UNPROCESSABLE_ENTITY)


def _listed_errors(error: RequestValidationError) -> list[Answer]:
    """The first errors in a body, without the body's values, which may be long."""
    found = error.errors()
    listed = [
        {
            "type": one["type"],
            "loc": [cut(at) if isinstance(at, str) else at for at in one["loc"]],
            "msg": cut(one["msg"]),
        }
        for one in found[:MOST_ERRORS]
    ]
    if more := len(found) - len(listed):
        msg = f"The body has {more} more errors"
        listed.append({"type": "more_errors", "loc": ["body"], "msg": msg})
    return listed


class _Route(APIRoute):
    """Answers a value that is refused as interp-engine's server does."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                response: Response = await handler(request)
            except RequestValidationError as error:
                return _refused(_listed_errors(error))
            except (ValueError, VLLMClientError) as error:
                return _refused(cut(str(error)))
            return response

        return answered


router = APIRouter(route_class=_Route)
PREFIXES = ("/v1", "/v1/interp-engine", "/v1/interp-engine/v1")
"""The second is for names that a later release may have itself.

With the third, `SERVER/v1/interp-engine` is a base URL for clients that ask for
`BASE/health` and `BASE/v1/describe`: `SERVER/health` is upstream's and has no body.
"""


def attach_router(app: FastAPI) -> None:
    """Mount the routes."""
    for prefix in PREFIXES:
        app.include_router(router, prefix=prefix)


def _model(request: Request) -> ServedModel:
    """The served model, made when it is first asked for."""
    state = request.app.state
    if "interp_engine" not in state._state:
        state.interp_engine = ServedModel(state.engine_client)
    model: ServedModel = state.interp_engine
    return model


@router.get("/health")
async def health(request: Request) -> Answer:
    """That the model is loaded; a server that is not does not answer."""
    return {"status": "ready", "model": _model(request).hf_model_id}


@router.get("/describe")
async def describe(request: Request) -> Answer:
    """What the model can serve."""
    return description(_model(request))


@router.post("/tokenize")
async def tokenize(request: Request, body: schema.Tokenize) -> Response:
    """Token ids of text or of a conversation, and each token's text."""
    model = _model(request)
    return await _sent(lambda: tokenized(model, body))


@router.post("/serves")
async def serves(request: Request, body: schema.Serves) -> Answer:
    """Why points cannot be read; null where they can."""
    model = _model(request)
    return {"refusals": {point: model.refuses(point) for point in body.points}}


@router.post("/capture")
async def capture(request: Request, body: schema.Capture) -> Response:
    """Rows of a prompt, by address."""
    model = _model(request)
    rows = len(body.prompt_token_ids if body.rows is None else body.rows)
    _room(request).take(rows * len(body.points), model.d_model, "rows")
    found = await model.capture(
        body.prompt_token_ids,
        body.points,
        steering_spec=body.steering,
        rows=body.rows,
    )
    named = {str(at): rows for at, rows in found.items()}
    return _tensors({"activations": named}, body.output_dtype)


@router.post("/project")
async def project(request: Request, body: schema.Project) -> Response:
    """Products of a prompt's rows with directions, per set."""
    directions = await asyncio.to_thread(_directions, body)
    count = sum(len(one.vectors) for one in directions)
    check_directions(sum(one.vectors.numel() for one in directions))
    _room(request).take(len(body.prompt_token_ids), count, "prompt_token_ids")
    values = await _model(request).project(
        body.prompt_token_ids, directions, steering_spec=body.steering
    )
    return _tensors({"values": values}, body.output_dtype)


def _directions(body: schema.Project) -> list[DirectionSet]:
    return [
        DirectionSet(
            one.point,
            decode_tensor(one.vectors),
            None if one.bias is None else decode_tensor(one.bias),
            one.nonlinearity,
        )
        for one in body.directions
    ]


@router.post("/unembed_rows")
async def unembed_rows(request: Request, body: schema.UnembedRows) -> Response:
    """Rows of the unembedding."""
    model = _model(request)
    _room(request).take(len(body.token_ids), model.d_model, "token_ids")
    rows = await model.unembed_rows(body.token_ids)
    return _tensors({"tensor": rows}, body.output_dtype)


@router.post("/decode_residuals")
async def decode_residuals(request: Request, body: schema.DecodeResiduals) -> Response:
    """Logits of rows, or the `top_k` largest."""
    model = _model(request)
    rows = await asyncio.to_thread(decode_tensor, body.residuals)
    count = len(rows) if rows.dim() else 1
    size = model.config.model_config.get_vocab_size()
    _room(request).take(count, size, "residuals")
    check_numbers(2 * count * min(body.top_k or 0, size), "top_k")
    if body.top_k is None:
        logits = await model.decode_residuals(rows)
        return _tensors({"tensor": logits}, body.output_dtype)
    ids, largest = await model.decoded(rows, body.top_k)
    return await _sent(lambda: {"token_ids": ids.tolist(), "logits": largest.tolist()})


@router.post("/generate")
async def generate(request: Request, body: schema.Generate) -> Response:
    """A generation, as lines of JSON or whole."""
    model = _model(request)
    knobs = body.model_dump(
        include={"temperature", "top_k", "top_p", "presence_penalty"}
    )
    steps = model.generate_steps(
        body.prompt_token_ids,
        max_tokens=body.max_tokens,
        stop_at_eos=body.stop_at_eos,
        n_logprobs=body.n_logprobs,
        seed=body.seed,
        steering_spec=body.steering,
        steer_generated=body.steer_generated,
        **knobs,
    )
    lines = _opened(token_step(step) async for step in steps)
    sampling = model.sampling_settings(**knobs).as_dict()

    def finish(seen: list[Answer]) -> str:
        return finish_of(seen, body.max_tokens, model.tokenizer.eos_token_id)

    def done(seen: list[Answer]) -> Answer:
        return {"type": "done", "finish": finish(seen), "n_tokens": len(seen)}

    def whole(seen: list[Answer]) -> Answer:
        return {
            "text": "".join(one["token_str"] for one in seen),
            "token_ids": [one["token_id"] for one in seen],
            "steps": _untyped(seen),
            "sampling": sampling,
            "finish": finish(seen),
        }

    start = {"type": "start", "sampling": sampling} if body.stream else None
    return await _answered(lines, start, done, whole)


@router.post("/lens")
async def lens(request: Request, body: schema.Lenses) -> Response:
    """Lenses at every position, as lines of JSON or whole."""
    model = _model(request)
    tokens = len(body.prompt_token_ids) + body.max_tokens - body.skip_before
    taps = sum(len(one.layers) for one in body.lenses)
    check_numbers(2 * body.top_n * taps * max(tokens, 0), "lenses")
    steps = model.generate_with_lens(
        body.prompt_token_ids,
        [LensSpec(one.layers, one.jacobian) for one in body.lenses],
        point=body.point,
        top_n=body.top_n,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        skip_before=body.skip_before,
        stream_reduce=body.stream_reduce,
        stream_index=body.stream_index,
        steering_spec=body.steering,
    )
    # Each step is written on a thread, so that other requests have a turn between two.
    lines = _opened(
        await asyncio.to_thread(lens_step, model, step) async for step in steps
    )
    layers = model.jacobians.get("default", [])
    return await _answered(
        lines,
        {"type": "start", "jacobian_layers": layers} if body.stream else None,
        lambda seen: {"type": "done", "n_steps": len(seen)},
        lambda seen: {"steps": _untyped(seen)},
    )


async def _sent(make: Callable[[], Answer]) -> Response:
    """The response with what `make` returns, which is called on a thread."""
    return await asyncio.to_thread(lambda: JSONResponse(make()))


def _tensors(value: Answer, dtype: str) -> Response:
    """The response with tensors, which is encoded as its client reads it."""
    pieces = made_on_threads(encoded_pieces(value, dtype))
    return StreamingResponse(pieces, media_type="application/json")


def _room(request: Request) -> Room:
    """The room of all responses of this server."""
    state = request.app.state
    if "interp_engine_room" not in state._state:
        state.interp_engine_room = Room()
    room: Room = state.interp_engine_room
    return room


async def _opened(lines: Any) -> Lines:
    """The same lines; the engine's request ends with them."""
    async with aclosing(lines):
        async for line in lines:
            yield line


def _untyped(lines: list[Answer]) -> list[Answer]:
    return [{k: v for k, v in line.items() if k != "type"} for line in lines]


async def _answered(
    lines: Lines,
    start: Answer | None,
    done: Callable[[list[Answer]], Answer],
    whole: Callable[[list[Answer]], Answer],
) -> Response:
    """Lines of JSON as they come, or the answer that is made of all of them.

    A request that is refused is so before the first line.

    Args:
        lines: those of a call.
        start: the line that tells what holds for all; None to answer as a whole.
        done: makes the last line, which tells how the call ended.
        whole: makes the answer.

    """
    first = await anext(lines, None)
    seen: list[Answer] = [] if first is None else [first]
    if start is None:
        seen += [line async for line in lines]
        return await _sent(lambda: whole(seen))

    async def written() -> AsyncIterator[str]:
        try:
            for line in (start, *seen):
                yield json.dumps(line) + "\n"
            async for line in lines:
                seen.append(line)
                yield json.dumps(line) + "\n"
            yield json.dumps(done(seen)) + "\n"
        except Exception as error:
            logger.exception("A stream of interp-engine's routes failed")
            failure = {"type": "error", "detail": described(error)}
            yield json.dumps(failure) + "\n"

    return StreamingResponse(written(), media_type="application/x-ndjson")
