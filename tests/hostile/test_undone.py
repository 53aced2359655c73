# SPDX-License-Identifier: Apache-2.0
"""Refused requests change nothing and do not affect later ones."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.entrypoints.test_steering_routes import VECTORS, application
from tests.v1.steering._ranks import Core
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import read_module

HEADERS = {"Authorization": "Bearer key"}
LONE = "\ud800"


@pytest.fixture
def client() -> TestClient:
    return TestClient(application(Core(), ["key"]), raise_server_exceptions=False)


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": {"origin": LONE}},
        {"metadata": {"norms": {f"post_block.1{LONE}": 1.0}}},
        {"name": LONE},
        {LONE: 1},
    ],
)
def test_text_that_no_answer_could_tell_of_is_registered_nowhere(
    client: TestClient, extra: dict[str, Any]
) -> None:
    body = {"name": "calm", "vectors": VECTORS} | extra
    refused = client.post(
        "/v1/steering/modules/register", content=json.dumps(body), headers=HEADERS
    )
    assert refused.status_code == 400, refused.text
    assert "lone surrogate" in refused.text
    modules = client.get("/v1/steering/modules")
    assert modules.status_code == 200 and modules.json()["modules"] == {}


def test_a_file_with_such_text_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "calm.json"
    body = {"vectors": VECTORS, "metadata": {"origin": LONE}}
    file.write_text(json.dumps(body))
    with pytest.raises(SteeringValidationError, match="origin in the metadata"):
        read_module(file)
