# SPDX-License-Identifier: Apache-2.0
"""The routes under `/v1/capture`."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm.v1.capture.frontend.disabled import NoCapture
from vllm.v1.capture.transport.handouts import HANDOUTS, KEPT_SECONDS

router = APIRouter(prefix="/v1/capture")


def attach_router(app: FastAPI) -> None:
    """Mount the routes."""
    app.include_router(router)


@router.get("")
async def get_capture(request: Request) -> JSONResponse:
    """Consumers, limits and counters of captured rows.

    Workers report their counters about once a second.
    """
    engine = getattr(request.app.state, "engine_client", None)
    capture = getattr(engine, "capture", None)
    if not isinstance(capture, NoCapture):
        raise HTTPException(HTTPStatus.NOT_IMPLEMENTED, "this server has no engine")
    await capture.listen(getattr(engine, "engine_core", None))
    return JSONResponse(capture.describe())


@router.delete("/shm/{token}")
async def free_answer(token: str) -> JSONResponse:
    """Free an answer in shared memory; existing mappings of the client stay valid."""
    if not HANDOUTS.free(token):
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            f"there is no answer {token!r}: it was freed, or is older than "
            f"{KEPT_SECONDS:.0f} s, or another API server has it",
        )
    return JSONResponse({"freed": token})
