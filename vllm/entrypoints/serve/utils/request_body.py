# SPDX-License-Identifier: Apache-2.0
"""Requests whose bodies are bounded, and read beside the event loop."""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute, request_response
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.serve.capture.sending import counting_unsent
from vllm.entrypoints.serve.steering.authority import captures_or_steers
from vllm.entrypoints.serve.utils.json_reader import INLINE_BYTES, read_json
from vllm.entrypoints.serve.utils.json_structure import (
    LIMITS,
    BodyError,
    too_large,
)

_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="request-body")
"""One large body at a time, whoever sends them."""


async def parse_json(raw: bytes) -> Any:
    """What a body says, read without holding up the event loop.

    Raises:
        BodyError: it holds more than a body may hold.
        ValueError: it is not JSON.

    """
    if len(raw) <= INLINE_BYTES:
        return read_json(raw)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_EXECUTOR, read_json, raw)


_DRAINED = 4
"""So many times the limit is read, and forgotten."""


class BoundedRequest(Request):
    """A request whose body is bounded, and read beside the event loop."""

    async def body(self) -> bytes:
        """The body.

        Raises:
            HTTPException: it is too large (413).

        """
        if not hasattr(self, "_body"):
            raw = await read_body(self)
            self._body = raw
        return self._body

    async def json(self) -> Any:
        """What the body says.

        Raises:
            HTTPException: it holds more than a body may hold (400).

        """
        if not hasattr(self, "_json"):
            try:
                self._json = await parse_json(await self.body())
            except BodyError as error:
                raise HTTPException(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        return self._json


async def read_body(request: Request) -> bytes:
    """The bytes of a body.

    A client that sends too much is answered once it has sent it: one that still sends
    does not read. What is far beyond the limit is not waited for.

    Raises:
        HTTPException: there are too many (413).

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
    """Let every route that is mounted read its bodies within the limits.

    Rows in their responses count until these are sent.
    Without capture and steering a server reads them as upstream does.
    """
    if not captures_or_steers(args):
        return
    for route in app.routes:
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
            handle = request_response(_bounded(route.get_route_handler()))
            route.app = counting_unsent(handle)


def _bounded(handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def bounded(request: Request) -> Response:
        inner = BoundedRequest(request.scope, request.receive, request._send)
        answer: Response = await handle(inner)
        return answer

    return bounded
