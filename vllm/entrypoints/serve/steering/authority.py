# SPDX-License-Identifier: Apache-2.0
"""Who may change steering over HTTP."""

import hashlib
import os
import secrets
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.engine_args import API_KEY_VARIABLE, given_values

if TYPE_CHECKING:
    from fastapi import FastAPI

MUTATING = frozenset(
    f"/v1/steering/{name}"
    for name in ("set", "clear", "modules/register", "modules/unregister")
)
"""Routes that need a steering key where one is set."""


def steering_keys(args: Namespace) -> list[bytes]:
    """Digests of the keys that are accepted, so that all comparisons cost the same."""
    keys = given_values(getattr(args, "steering_api_key", None))
    keys.append(os.environ.get(API_KEY_VARIABLE, ""))
    return [_digest(key) for key in keys if key]


def has_own_authority(scope: Mapping[str, Any]) -> bool:
    """Whether a request is checked here instead of by the server's own key.

    A client sends one `Authorization` header, and changing steering needs the
    steering key.
    """
    app: FastAPI | None = scope.get("app")
    keys = getattr(getattr(app, "state", None), "steering_keys", None)
    path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
    return bool(keys) and scope.get("type") == "http" and path in MUTATING


def may_change(keys: list[bytes], authorization: str | None) -> bool:
    """Whether a request with this `Authorization` header may change steering.

    Without keys the server's own key, if any, has been checked already.
    """
    if not keys:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    digest = _digest(key)
    matches = [secrets.compare_digest(digest, known) for known in keys]
    return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
