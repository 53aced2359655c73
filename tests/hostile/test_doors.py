# SPDX-License-Identifier: Apache-2.0
"""Access to capture, steering and changes of steering, on every mounted route."""

import json
from argparse import Namespace
from typing import Any
from unittest.mock import patch

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tests.entrypoints.test_steering_routes import VECTORS, application
from tests.hostile.client import Client
from tests.hostile.conftest import WIDTH
from tests.v1.steering._ranks import Core
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.steering.authority import (
    MUTATING,
    captures_or_steers,
    may_change,
    steering_keys,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

STEERS = {"steering_vectors": {"post_block": {"1": [0.5] * WIDTH}}}
CAPTURES = {
    "capture": {"inline": {"hooks": {"post_block": "all"}}},
    "capture_wait": True,
}
BODY = {"model": "tiny", "prompt": [20, 30, 40], "max_tokens": 1}
CHAT = {"model": "tiny", "max_tokens": 1}
CHAT |= {"messages": [{"role": "user", "content": "a story"}]}  # type: ignore[dict-item]
TOKENS = {"token_ids": [20, 30, 40]}

GENERATES: dict[str, dict[str, Any]] = {
    "/invocations": BODY,
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"]]},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "tiny", "input": "x", "max_output_tokens": 1},
    "/inference/v1/generate": {**TOKENS, "sampling_params": {"max_tokens": 1}},
    "/v1/generate": {"prompt_token_ids": [20, 30, 40], "max_tokens": 1},
    "/v1/interp-engine/generate": {"prompt_token_ids": [20, 30, 40], "max_tokens": 1},
}
"""Every route that generates, with a valid body."""

INTERP_ENGINE = {"/v1/generate", "/v1/interp-engine/generate"}
"""Refuse our fields, as they refuse every field that interp-engine lacks."""

READS_NO_FIELDS = {
    *("/generative_scoring", "/v1/systemone", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/ping", "/scale_elastic_ep"),
    *("/is_scaling_elastic_ep", "/v1/responses/{response_id}/cancel"),
    *("/v1/chat/completions/render", "/v1/messages/render", "/v1/completions/render"),
    *("/v1/responses/render", "/v1/chat/completions/derender"),
    *("/v1/completions/derender", "/inference/v1/abort_requests"),
}
"""Upstream routes that generate nothing that our fields could change."""

READS_ROWS = {
    f"{prefix}/{name}"
    for prefix in ("/v1", "/v1/interp-engine")
    for name in (
        *("tokenize", "serves", "capture", "project"),
        *("unembed_rows", "decode_residuals", "lens"),
    )
}
"""Routes of interp-engine that generate nothing."""

CHECKS_ALL = {"/v1/patch_sweep"}
"""Routes whose bodies are read whole by a schema of ours."""

MOUNTED_AGAIN = {
    f"/v1/interp-engine{path}"
    for path in READS_ROWS | {"/v1/generate"}
    if not path.startswith("/v1/interp-engine")
}
"""The same routes for clients whose base URL is `SERVER/v1/interp-engine`."""


def routes_of(*arguments: str) -> set[str]:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", "--enable-scale-out", *arguments])
    app = build_app(args, ("generate",))
    return {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }


def test_every_route_that_upstream_mounts_is_known_here() -> None:
    found = routes_of("--vllm-lens-api", "--interp-engine-api")
    known = set(GENERATES) | READS_NO_FIELDS | READS_ROWS | MOUNTED_AGAIN | MUTATING
    known |= CHECKS_ALL
    assert found == known


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATES)
def test_with_the_key_our_fields_are_carried_out_or_refused(
    client: Client, path: str
) -> None:
    body = GENERATES[path]
    assert client.post(path, body).status == 200
    for fields in (STEERS, CAPTURES):
        reply = client.post(path, body | fields)
        refusal = 422 if path in INTERP_ENGINE else 400
        assert reply.status in (200, refusal), reply
        if reply.status == refusal:
            assert any(name in str(reply.body) for name in fields)
        elif fields is CAPTURES:
            assert reply.body["capture_results"]["inline"]["status"] == "ok"


@pytest.mark.e2e
@pytest.mark.slow
def test_no_response_of_a_server_contains_a_key(
    client: Client, steering_key: str, api_key: str
) -> None:
    secret = steering_key.removeprefix("schlüssel-")
    for path in (
        *("/server_info?config_format=json", "/server_info", "/v1/capture"),
        *("/v1/steering", "/openapi.json", "/metrics", "/version"),
    ):
        told = client.get(path)
        assert told.status == 200, (path, told)
        text = json.dumps(told.body)
        assert secret not in text and api_key not in text, path
    log = client.server.log.read_text()
    assert secret not in log and api_key not in log


@pytest.mark.e2e
@pytest.mark.slow
def test_a_key_with_other_letters_works(stranger: Client, steering_key: str) -> None:
    for key in (
        steering_key.encode(),
        steering_key.encode("latin-1"),
        f"second-{steering_key}".encode(),
    ):
        assert stranger.post("/v1/steering/clear", {}, key).status == 200
    wrong = steering_key.replace("ü", "u").encode()
    assert stranger.post("/v1/steering/clear", {}, wrong).status == 401


def test_a_key_that_latin_1_does_not_have_works() -> None:
    with patch.dict("os.environ", {"VLLM_STEERING_API_KEY": ""}):
        keys = steering_keys(Namespace(steering_api_key=["ключ"]))
    sent = "ключ".encode().decode("latin-1")
    assert may_change(keys, f"Bearer {sent}")
    assert not may_change(keys, "Bearer клю") and not may_change(keys, "Bearer ")


def test_a_server_without_a_key_says_how_to_get_the_routes() -> None:
    told = TestClient(application(Core(), []))
    for path in MUTATING:
        refused = told.post(path, json={"vectors": VECTORS})
        assert refused.status_code == 404
        assert "--steering-api-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "options",
    [
        *(["--enable-steering"], ["--enable-readouts"], ["--interp-engine-api"]),
        *(["--capture-consumers", "inline"], ["--readout-modules", "a=b"]),
        *(["--vllm-lens-api"], ["--sae", "a=b"]),
    ],
    ids=lambda options: options[0],
)
def test_every_feature_brings_its_bounds(options: list[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    assert captures_or_steers(parser.parse_args(["--model", "m", *options]))
    assert not captures_or_steers(parser.parse_args(["--model", "m"]))
