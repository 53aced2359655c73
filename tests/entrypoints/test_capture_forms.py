# SPDX-License-Identifier: Apache-2.0
"""Rows over HTTP in each form of response."""

import base64
import json
import mmap
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support.server import Server
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = list(range(10, 250))
HOOKS = ("pre_attn", "post_attn", "post_block")


@pytest.fixture(scope="module")
def server(capture_server: Server) -> Server:
    return capture_server


def body(**more: Any) -> dict[str, Any]:
    hooks = more.pop("hooks", ["post_block"])
    spec = {"hooks": dict.fromkeys(hooks, "all"), "positions": "all_prompt", **more}
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0.0,
        "capture": {"inline": spec},
    }


def fetch(server: Server, accept: str, **more: Any) -> tuple[str, bytes]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body(**more)).encode(),
        {"Content-Type": "application/json", "Accept": accept},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.headers["Content-Type"], reply.read()


@pytest.fixture(scope="module")
def rows(server: Server) -> dict[int, torch.Tensor]:
    """The rows by layer, from the JSON form."""
    kind, data = fetch(server, "application/json")
    assert kind == "application/json"
    payload = json.loads(data)["capture_results"]["inline"]["payload"]
    assert payload
    return {told["layer"]: tensor(base64.b64decode(told["data"])) for told in payload}


def tensor(data: bytes) -> torch.Tensor:
    flat = np.frombuffer(data, dtype=np.float32).copy()
    return torch.from_numpy(flat).view(len(PROMPT), -1)


def test_safetensors(server: Server, rows: dict[int, torch.Tensor]) -> None:
    kind, data = fetch(server, "application/safetensors")
    assert kind == "application/safetensors"
    found = safetensors.torch.load(data)
    assert len(found) == len(rows)
    for layer, wanted in rows.items():
        assert torch.equal(found[f"inline/{layer}_post_block"], wanted)


@pytest.mark.parametrize("streams", [False, True])
def test_a_form_that_is_not_sent_is_refused_before_anything_runs(
    server: Server, streams: bool
) -> None:
    asked = {**body(), "stream": streams}
    for accept in ("multipart/mixed", "application/vnd.apache.arrow.stream"):
        status, reply = server.post("/v1/completions", asked, Accept=accept)
        error = reply["error"]
        assert status == 400 and error["param"] == "Accept"
        assert accept in error["message"]
        assert "use application/safetensors" in error["message"]


def test_shared_memory(server: Server, rows: dict[int, torch.Tensor]) -> None:
    _, data = fetch(server, "application/json", transport="shm")
    payload = json.loads(data)["capture_results"]["inline"]["payload"]
    for told in payload:
        assert "data" not in told
        where = told["shm"]
        with open(where["path"], "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        found = tensor(mapped[where["offset"] : where["offset"] + where["nbytes"]])
        assert torch.equal(found, rows[told["layer"]])
    path = f"/v1/capture/shm/{payload[0]['shm']['token']}"
    assert [server.delete(path).status for _ in range(2)] == [200, 404]


def test_a_chat_stream_carries_rows_too(server: Server) -> None:
    asked = body() | {"messages": [{"role": "user", "content": "a story"}]}
    del asked["prompt"]
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.stream("/v1/chat/completions", asked))
    (told,) = [chunk for chunk in chunks if chunk.get("capture_results")]
    assert told["choices"][0]["finish_reason"] and told["usage"]
    assert told["capture_results"]["inline"]["payload"][0]["data"]


def test_rows_come_without_a_copy_and_their_memory_comes_back(server: Server) -> None:
    fetch(server, "application/safetensors", hooks=HOOKS)

    def told() -> Any:
        return server.get("/v1/capture").body["host_memory"]

    # The worker's first report may come after its first answer.
    until(lambda: (one := told()) and one[0]["lent_bytes"] and not one[0]["leases"])
    (memory,) = told()
    assert memory["held_bytes"] <= memory["budget_bytes"]
    assert memory["overflow_bytes"] == 0
