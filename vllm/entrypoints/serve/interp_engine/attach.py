# SPDX-License-Identifier: Apache-2.0
"""Mounts interp-engine's routes where the server was started for them."""

from typing import Any

from fastapi import FastAPI

PREFIXES = ("/v1", "/v1/interp-engine", "/v1/interp-engine/v1")
"""The second is for names that a later release may have itself.

With the third, `SERVER/v1/interp-engine` is a base URL for clients that ask for
`BASE/health` and `BASE/v1/describe`: `SERVER/health` is upstream's and has no body.
"""


def attach_router(app: FastAPI, args: Any) -> None:
    """Mount the routes, if the server was started with `--interp-engine-api`."""
    if not args.interp_engine_api:
        return
    from vllm.entrypoints.serve.interp_engine.api_router import router

    for prefix in PREFIXES:
        app.include_router(router, prefix=prefix)
