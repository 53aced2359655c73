# SPDX-License-Identifier: Apache-2.0
"""Mounts the routes of the features."""

from argparse import Namespace

from fastapi import FastAPI

from vllm.entrypoints.serve.capture import api_router as capture
from vllm.entrypoints.serve.hooks import api_router as hooks
from vllm.entrypoints.serve.lens_page import route as lens_page
from vllm.entrypoints.serve.patching import api_router as patching
from vllm.entrypoints.serve.readouts import api_router as readouts
from vllm.entrypoints.serve.steering import api_router as steering


def attach_routers(app: FastAPI, args: Namespace) -> None:
    """Mount the routes of a server that generates text."""
    capture.attach_router(app)
    steering.attach_router(app, args)  # Reads the keys that the others need.
    readouts.attach_router(app)
    patching.attach_router(app)
    hooks.attach_router(app, args)
    if args.interp_engine_api:
        from vllm.entrypoints.serve.interp_engine import api_router as interp_engine

        interp_engine.attach_router(app)
    lens_page.attach_router(app, args)
