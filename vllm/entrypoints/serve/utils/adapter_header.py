# SPDX-License-Identifier: Apache-2.0
"""Adds the adapter named by a SageMaker header to the body of a request."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeAlias

from fastapi import Request

from vllm.entrypoints.serve.utils.request_body import BoundedRequest

Handle: TypeAlias = Callable[[Request], Awaitable[Any]]


def bounded(decorate: Callable[[Handle], Handle], header: str) -> Callable[..., Handle]:
    """A replacement for `decorate` that does not serialize the body again.

    `decorate` prints the whole body as a debug message and serializes it again, both on
    the event loop. It is still used if bodies are not limited.

    Args:
        decorate: `inject_adapter_id(adapter_path="model")` of SageMaker's standards.
        header: the name of the header.

    """

    def apply(handle: Handle) -> Handle:
        decorated = decorate(handle)

        @wraps(handle)
        async def handle_bounded(raw_request: Request) -> Any:
            if not isinstance(raw_request, BoundedRequest):
                return await decorated(raw_request)
            body = await raw_request.json()
            if isinstance(body, dict):
                body["model"] = raw_request.headers.get(header)
            return await handle(raw_request)

        return handle_bounded

    return apply
