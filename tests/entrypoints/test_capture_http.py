# SPDX-License-Identifier: Apache-2.0
"""Capture over HTTP: requests, responses, streams, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_reference import Reference, relative_error
from tests.support.server import SHORT, Server
from vllm.entrypoints.serve.utils.residual_fields import FIELDS
from vllm.v1.capture.consumers.filesystem import read_per_file, read_request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [20, 30, 40, 50, 60, 70]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a short story"}]}


def body(name: str, positions: Any = "all", **more: Any) -> dict[str, Any]:
    spec = {"request_id": name, "tag": "http", "hooks": {"post_block": "all"}}
    capture = {"filesystem": spec | {"positions": positions}}
    return {**SHORT, "capture": capture, "capture_wait": True, **more}


def completion(name: str, positions: Any = "all", **more: Any) -> dict[str, Any]:
    return body(name, positions, **{"prompt": PROMPT, "return_token_ids": True} | more)


def chat(name: str, **more: Any) -> dict[str, Any]:
    return body(name, "last_prompt", **CHAT | more)


def test_a_completion_carries_its_results(
    capture_server: Server, capture_root: Path, capture_model: Path
) -> None:
    status, reply = capture_server.post("/v1/completions", completion("completion"))
    assert status == 200, reply
    results = reply["capture_results"]
    assert results["filesystem"]["status"] == "ok"
    assert results["logging"]["status"] == "ok"  # captures every request
    assert all(Path(path).is_file() for path in results["filesystem"]["payload"])
    fed = [*PROMPT, *reply["choices"][0]["token_ids"]][:-1]
    expected = Reference(capture_model).stream(fed)
    rows = read_request(capture_root, "http", "completion")
    assert sorted(rows) == [(layer, "post_block") for layer in range(3)]
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4
    _, sidecar = read_per_file(
        capture_root / "http" / "completion" / "1_post_block.json"
    )
    assert sidecar["positions"] == list(range(10)) and sidecar["token_ids"] == fed
    assert sidecar["layer_convention"] == "0-based block index"
    assert sidecar["model"] == "tiny"


def test_several_prompts_have_results_by_prompt(capture_server: Server) -> None:
    request = completion("", prompt=[PROMPT, PROMPT[:3]])
    request["capture"]["filesystem"].pop("request_id")
    status, reply = capture_server.post("/v1/completions", request)
    assert status == 200, reply
    result = reply["capture_results"]["filesystem"]
    assert result["status"] == "ok"
    paths = [path for paths in result["payload"].values() for path in paths]
    assert len(set(paths)) == 6
    shapes = {read_per_file(path)[0].shape[0] for path in paths}
    assert shapes == {len(PROMPT) + 4, 3 + 4}


def test_several_prompts_cannot_share_a_request_id(capture_server: Server) -> None:
    request = completion("shared", prompt=[PROMPT, PROMPT[:3]])
    status, reply = capture_server.post("/v1/completions", request)
    assert status == 400
    assert "capture.filesystem.request_id: 2 prompts" in reply["error"]["message"]
    one = completion("alone", prompt=[PROMPT])
    assert capture_server.post("/v1/completions", one).status == 200


def tokens(name: str, **more: Any) -> dict[str, Any]:
    """A request of token ids, with our fields among its sampling parameters."""
    asked = body(name)
    del asked["model"]
    return {"token_ids": PROMPT, "sampling_params": asked} | more


def test_a_request_made_of_tokens_and_its_last_chunk_carry_the_results(
    capture_server: Server, capture_root: Path
) -> None:
    status, reply = capture_server.post("/inference/v1/generate", tokens("tokens"))
    assert status == 200, reply
    request = tokens("token-stream", stream=True)
    chunks = list(capture_server.stream("/inference/v1/generate", request))
    assert [chunk for chunk in chunks if "capture_results" in chunk] == chunks[-1:]
    for one in (reply, chunks[-1]):
        assert one["capture_results"]["filesystem"]["status"] == "ok"
    whole, streamed = (
        read_request(capture_root, "http", name) for name in ("tokens", "token-stream")
    )
    assert len(whole) == 3 and all(whole[tap].equal(streamed[tap]) for tap in whole)


BAD: list[tuple[Any, list[str]]] = [
    ({"nobody": {}}, ["nobody", "filesystem", "--capture-consumers"]),
    ({"filesystem": {"hooks": {"post_block": [3]}}}, ["layer 3", "0 to 2"]),
    ({"filesystem": {"hooks": {"pre_attn": [0]}, "x": 1}}, ["'x'", "positions"]),
    (
        {"filesystem": {"hooks": {"pre_attn": [0]}, "positions": [500]}},
        ["500", "max_tokens"],
    ),
    ("filesystem", ["capture"]),
]


@pytest.mark.parametrize("capture, said", BAD)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_input_is_refused_with_parameter_value_and_remedy(
    capture_server: Server, path: str, capture: Any, said: list[str]
) -> None:
    request = chat("bad") if "chat" in path else completion("bad")
    status, reply = capture_server.post(path, request | {"capture": capture})
    assert status == 400, reply
    text = json.dumps(reply["error"], ensure_ascii=False)
    assert all(word in text for word in said), text
    assert "Traceback" not in text


CANNOT: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": "hello", "use_beam_search": True}),
]


@pytest.mark.parametrize("path, request_body", CANNOT)
def test_a_request_that_cannot_carry_a_capture_refuses_it(
    capture_server: Server, path: str, request_body: dict[str, Any]
) -> None:
    for name in ("capture", "capture_wait"):
        fields = {"model": "tiny", name: completion("x")[name]}
        status, reply = capture_server.post(path, request_body | fields)
        assert status == 400, reply
        assert "capture" in json.dumps(reply)


@pytest.mark.parametrize("kind", ["CompletionRequest", "ChatCompletionRequest"])
def test_the_servers_description_has_our_fields(
    capture_server: Server, kind: str
) -> None:
    schemas = capture_server.get("/openapi.json").body["components"]["schemas"]
    assert set(FIELDS) <= schemas[kind]["properties"].keys()
