# SPDX-License-Identifier: Apache-2.0
"""Requests whose bodies are bounded and parsed off the event loop."""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, request_response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.capture.sending import counting_unsent
from vllm.entrypoints.serve.steering.authority import captures_or_steers
from vllm.entrypoints.serve.utils.json_reader import (
    INLINE_BYTES,
    LIMITS,
    BodyError,
    read_json,
    too_large,
)
from vllm.entrypoints.serve.utils.piecewise import check_in_pieces
from vllm.v1.capture.transport.bodies import form_for
from vllm.v1.residual.bounds import shown

_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="request-body")
"""Parses one large body at a time."""


async def parse_json(raw: bytes) -> Any:
    """Parse a body; a large one on a thread.

    Raises:
        BodyError: the body exceeds a limit.
        ValueError: the body is not JSON.

    """
    if len(raw) <= INLINE_BYTES:
        return read_json(raw)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_EXECUTOR, read_json, raw)


_DRAINED = 4
"""Bodies are read and discarded up to this multiple of the size limit."""


class BoundedRequest(Request):
    """A request whose body is bounded and parsed off the event loop."""

    async def body(self) -> bytes:
        """The body's bytes.

        Raises:
            HTTPException: the body is too large (413).

        """
        if not hasattr(self, "_body"):
            raw = await read_body(self)
            self._body = raw
        return self._body

    async def json(self) -> Any:
        """The parsed body.

        Raises:
            HTTPException: the body exceeds a limit (400 or 413).
            ValueError: the body is not JSON.

        """
        if not hasattr(self, "_json"):
            try:
                self._json = await parse_json(await self.body())
            except BodyError as error:
                raise HTTPException(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        return self._json


async def read_body(request: Request) -> bytes:
    """Read a body.

    A body that is too large is read to its end and discarded, as a client usually reads
    the response only after sending. A body far above the limit is not.

    Raises:
        HTTPException: the body is too large (413).

    """
    refused = HTTPException(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: {too_large(LIMITS)}"
    )
    said = request.headers.get("Content-Length", "")
    is_count = said.isascii() and said.isdigit() and len(said) < 20
    if is_count and int(said) > _DRAINED * LIMITS.num_bytes:
        raise refused
    raw = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= LIMITS.num_bytes:
            raw += chunk
        else:
            raw.clear()
        if size > _DRAINED * LIMITS.num_bytes:
            break
    if size > LIMITS.num_bytes:
        raise refused
    return bytes(raw)


def bound_bodies(app: FastAPI, args: Namespace) -> None:
    """Make all POST routes mounted so far read their bodies within the limits.

    Captured rows in their responses count towards `max_inflight_bytes` until they are
    sent. Does nothing on a server without capture and steering.
    """
    if not captures_or_steers(args):
        return
    for route in app.routes:
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
            handle = _bounded(route.get_route_handler(), _models_of(route))
            route.app = counting_unsent(request_response(handle))


def _models_of(route: APIRoute) -> tuple[type[BaseModel], ...]:
    """The classes of requests that a route takes."""
    if route.path == "/invocations":  # Reads the body itself.
        return (ChatCompletionRequest, CompletionRequest)
    kind = None if route.body_field is None else route.body_field.field_info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return (kind,)
    return ()


LEAST = 1024
"""Bodies with fewer bytes have no long parts."""
MAX_ERRORS = 100
"""Validation errors of a request that are kept; upstream reports fewer."""
MAX_INPUT = 200
"""Characters of a text that a validation error repeats."""


def short_errors(errors: Sequence[Any]) -> list[Any]:
    """Validation errors that do not hold what was sent, for the log and the response.

    Each names its input, which may be the whole body.
    """
    return [
        {**one, "input": _summary(one["input"])} if "input" in one else one
        for one in errors[:MAX_ERRORS]
    ]


def _summary(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str):
        return value if len(value) <= MAX_INPUT else value[:MAX_INPUT] + "..."
    return value if isinstance(value, (bool, float)) else shown(value)


def _bounded(
    handle: Callable[[Request], Any], models: tuple[type[BaseModel], ...]
) -> Callable[[Request], Any]:
    async def bounded(request: Request) -> Response:
        form_for(request.headers.get("accept", ""))
        inner = BoundedRequest(request.scope, request.receive, request._send)
        try:
            await _check_long_parts(inner, models)
        except ClientDisconnect:  # Upstream logs no error either; nobody reads this.
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        try:
            answer: Response = await handle(inner)
        except RequestValidationError as error:
            raise RequestValidationError(short_errors(error.errors())) from None
        return answer

    return bounded


async def _check_long_parts(
    request: BoundedRequest, models: tuple[type[BaseModel], ...]
) -> None:
    """Validate what takes long in pieces; a body that is no JSON is refused later.

    Raises:
        RequestValidationError: a long list or object of the body is invalid.

    """
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not models or kind != "application/json" or len(await request.body()) < LEAST:
        return
    try:
        body = await request.json()
    except (HTTPException, ValueError, RecursionError):
        return
    chosen = [one for one in models if "messages" not in one.model_fields]
    chats = isinstance(body, dict) and "messages" in body
    model = models[0] if chats or not chosen else chosen[0]
    if errors := await check_in_pieces(model, body):
        raise RequestValidationError(
            short_errors([{**one, "loc": ("body", *one["loc"])} for one in errors])
        )
