# SPDX-License-Identifier: Apache-2.0
"""Long texts in unexpected places take little memory and are not repeated."""

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from pydantic import BaseModel

from tests.entrypoints.test_steering_routes import VECTORS
from vllm.entrypoints.serve.utils.request_body import _bounded, short_errors
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import read_module
from vllm.v1.steering.spec.table import as_array

LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "raw",
    [LONG, [0.5] * 63 + [LONG], [[0.5, LONG]] * 64, [True, "1.5"], {"a": LONG}],
    ids=["text", "one of a vector", "of each row", "a number as text", "object"],
)
def test_a_text_in_a_vector_takes_no_memory(raw: Any) -> None:
    # An array of texts would take four times the longest text's bytes per element.
    tracemalloc.start()
    try:
        with pytest.raises(SteeringValidationError, match="real numbers"):
            as_array(raw, "steering_vectors")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


class Body(BaseModel):
    names: list[int]


def test_validation_errors_do_not_hold_what_was_sent() -> None:
    app, seen = FastAPI(), []

    @app.post("/names")
    async def names(body: Body) -> None:
        """Nothing."""

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Any:
        from starlette.responses import JSONResponse

        seen.append(str(error))
        return JSONResponse({"message": str(error)}, 400)

    (route,) = [one for one in app.routes if isinstance(one, APIRoute)]
    from fastapi.routing import request_response

    route.app = request_response(_bounded(route.get_route_handler(), (Body,)))
    client = TestClient(app)
    for body in ({"names": LONG}, {"names": [LONG] * 20}, {"other": [LONG] * 5}):
        assert client.post("/names", json=body).status_code == 400
    assert len(seen) == 3 and max(map(len, seen)) < 20_000
    assert client.post("/names", json={"names": [1]}).status_code == 200


def test_few_of_many_errors_are_kept() -> None:
    errors = [{"type": "int", "loc": ("body", i), "input": i} for i in range(1000)]
    kept = short_errors(errors)
    assert 1 <= len(kept) <= 100
    assert kept[0]["loc"] == ("body", 0)


def test_half_a_character_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calm.json"
    body = {"vectors": VECTORS, "metadata": {"origin": "\ud800"}}
    file.write_text(json.dumps(body))
    with pytest.raises(SteeringValidationError, match="origin in the metadata"):
        read_module(file)


def test_a_client_that_leaves_while_it_sends_is_no_error() -> None:
    async def handle(request: Request) -> Response:
        raise AssertionError("there is no body")

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "headers": headers}, receive)
    answer = asyncio.run(_bounded(handle, (BaseModel,))(request))
    assert answer.status_code == 400
