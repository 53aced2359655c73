# SPDX-License-Identifier: Apache-2.0
"""`vllm capture --server` refuses servers without rows."""

import httpx
import pytest

from tests.client._answering import served
from vllm.capture_dataset import remote
from vllm.v1.capture.errors import CaptureValidationError


def without_rows(request: httpx.Request) -> httpx.Response:
    """What a server answers that captures to files only."""
    told: dict[str, object] = {"consumers": [{"name": "filesystem"}], "hook_points": {}}
    if request.url.path == "/v1/models":
        told = {"data": [{"id": "m", "max_model_len": 64}]}
    return httpx.Response(200, json=told)


def test_a_server_without_the_consumer_is_refused() -> None:
    said = "--capture-consumers inline"
    with served(without_rows) as url, pytest.raises(CaptureValidationError, match=said):
        remote.Server(url, None, None, concurrency=1)


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(CaptureValidationError, match="does not answer"):
        remote.Server("http://127.0.0.1:9", None, None, concurrency=1)
