# SPDX-License-Identifier: Apache-2.0
"""Who may change steering over HTTP."""

import hashlib
import os
import secrets
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.frontend.engine_args import API_KEY_VARIABLE, given_values

if TYPE_CHECKING:
    from fastapi import FastAPI

MUTATING = frozenset(
    f"/v1/steering/{name}"
    for name in ("set", "clear", "modules/register", "modules/unregister")
) | {
    f"/v1/{place}/{name}"
    for place in ("readouts/modules", "sae")
    for name in ("register", "unregister")
}
"""Routes that need a steering key where one is set."""


def steering_keys(args: Namespace) -> list[bytes]:
    """Digests of the keys that are accepted, so that all comparisons cost the same."""
    keys = given_values(getattr(args, "steering_api_key", None))
    keys.append(os.environ.get(API_KEY_VARIABLE, ""))
    written = [form for key in keys if key for form in _forms(key)]
    return [hashlib.sha256(form).digest() for form in written]


OPEN_UPSTREAM = frozenset({"/invocations"})
"""Routes that generate and that upstream's key does not guard."""


def captures_or_steers(args: Namespace) -> bool:
    """Whether a server was started to capture or to steer."""
    steers = getattr(args, "enable_steering", False)
    return bool(steers or getattr(args, "capture_consumers", None))


def needs_server_key(scope: Mapping[str, Any]) -> bool:
    """Whether a request may capture or steer, on a route that upstream leaves open."""
    path = _path(scope)
    if scope.get("type") != "http" or path not in OPEN_UPSTREAM:
        return False
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return args is not None and captures_or_steers(args)


def has_own_authority(scope: Mapping[str, Any]) -> bool:
    """Whether a request is checked here instead of by the server's own key.

    A client sends one `Authorization` header, and changing steering needs the
    steering key.
    """
    app: FastAPI | None = scope.get("app")
    keys = getattr(getattr(app, "state", None), "steering_keys", None)
    return bool(keys) and scope.get("type") == "http" and _path(scope) in MUTATING


def _path(scope: Mapping[str, Any]) -> str:
    return str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))


def may_change(keys: list[bytes], authorization: str | None) -> bool:
    """Whether a request with this `Authorization` header may change steering.

    Without keys the server's own key, if any, has been checked already.
    """
    if not keys:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    try:
        sent = key.encode("latin-1")  # As the server has read the header's bytes.
    except UnicodeEncodeError:
        sent = key.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(sent).digest()
    matches = [secrets.compare_digest(digest, known) for known in keys]
    return any(matches)


def _forms(key: str) -> set[bytes]:
    """A key as clients may write it into a header: in UTF-8, or in Latin-1."""
    forms = {os.fsencode(key)}
    for encoding in ("utf-8", "latin-1"):
        with suppress(UnicodeEncodeError):
            forms.add(key.encode(encoding))
    return forms
