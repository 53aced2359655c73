# SPDX-License-Identifier: Apache-2.0
"""Authorization of requests that change steering or readout modules over HTTP."""

import hashlib
import os
import secrets
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from vllm.v1.steering.frontend.engine_args import API_KEY_VARIABLE, given_values

if TYPE_CHECKING:
    from fastapi import FastAPI

_ROUTES = {
    "steering": "set clear",
    "hooks": "register collect clear clear_results prefetch clear_prefetched",
    **dict.fromkeys(
        ("steering/modules", "steering/vectors", "readouts/modules", "sae"),
        "register unregister",
    ),
}
MUTATING = frozenset(
    f"/v1/{place}/{name}" for place, names in _ROUTES.items() for name in names.split()
)
"""Routes that require a steering key if the server has one."""


def steering_keys(args: Namespace) -> list[bytes]:
    """SHA-256 digests of the accepted keys; digests compare in constant time."""
    keys = given_values(getattr(args, "steering_api_key", None))
    keys.append(os.environ.get(API_KEY_VARIABLE, ""))
    written = [form for key in keys if key for form in _forms(key)]
    return [hashlib.sha256(form).digest() for form in written]


OPEN_UPSTREAM = frozenset(
    {
        *("/invocations", "/generative_scoring"),
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        *("/fault_tolerance/apply", "/start_profile", "/stop_profile"),
    }
)
"""Routes that generate, change the engines or write files, and that upstream's API key
does not protect."""


def captures_or_steers(args: Namespace) -> bool:
    """Whether a server was started with capture, readouts or steering."""
    return any(getattr(args, name, None) for name in ENABLING)


ENABLING = (
    *("capture_consumers", "enable_steering", "enable_readouts"),
    *("readout_modules", "sae", "vllm_lens_api", "interp_engine_api"),
    "enable_patching",
)
"""Options that enable them."""


def needs_server_key(scope: Mapping[str, Any]) -> bool:
    """Whether upstream leaves the route of a server that captures or steers open."""
    path = _path(scope)
    if scope.get("type") != "http" or path not in OPEN_UPSTREAM:
        return False
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return args is not None and captures_or_steers(args)


def has_own_authority(scope: Mapping[str, Any]) -> bool:
    """Whether the route checks the steering key instead of the server's API key.

    A client sends a single `Authorization` header, which on these routes has the
    steering key.
    """
    app: FastAPI | None = scope.get("app")
    keys = getattr(getattr(app, "state", None), "steering_keys", None)
    return bool(keys) and scope.get("type") == "http" and _path(scope) in MUTATING


def _path(scope: Mapping[str, Any]) -> str:
    return str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))


def may_change(keys: list[bytes], authorization: str | None) -> bool:
    """Whether a request with this `Authorization` header may change steering.

    Without steering keys, upstream has already checked the server's API key, if any.
    """
    if not keys:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    try:
        sent = key.encode("latin-1")  # The server decodes header bytes as Latin-1.
    except UnicodeEncodeError:
        sent = key.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(sent).digest()
    matches = [secrets.compare_digest(digest, known) for known in keys]
    return any(matches)


def _forms(key: str) -> set[bytes]:
    """A key's bytes as clients may encode them in a header: UTF-8 or Latin-1."""
    forms = {os.fsencode(key)}
    for encoding in ("utf-8", "latin-1"):
        with suppress(UnicodeEncodeError):
            forms.add(key.encode(encoding))
    return forms


class KeyedRoute(APIRoute):
    """Answers 401, before it reads a body, to a request without a valid key."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """The route's handler, called for requests with a valid key."""
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            keys = request.app.state.steering_keys
            if may_change(keys, request.headers.get("Authorization")):
                response: Response = await handler(request)
                return response
            return JSONResponse(
                {
                    "error": "Unauthorized: this route needs a steering key "
                    "(--steering-api-key), not the server's API key"
                },
                status_code=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )

        return answered
