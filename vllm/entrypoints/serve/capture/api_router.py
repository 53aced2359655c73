# SPDX-License-Identifier: Apache-2.0
"""The route `/v1/capture`."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm.v1.capture.frontend.disabled import NoCapture

router = APIRouter(prefix="/v1/capture")


def attach_router(app: FastAPI) -> None:
    """Mount the route."""
    app.include_router(router)


@router.get("")
async def get_capture(request: Request) -> JSONResponse:
    """Consumers, limits, and what was captured so far.

    Workers report their counters about once a second.
    """
    engine = getattr(request.app.state, "engine_client", None)
    capture = getattr(engine, "capture", None)
    if not isinstance(capture, NoCapture):
        raise HTTPException(HTTPStatus.NOT_IMPLEMENTED, "this server has no engine")
    await capture.listen(getattr(engine, "engine_core", None))
    return JSONResponse(capture.describe())
