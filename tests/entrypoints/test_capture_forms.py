# SPDX-License-Identifier: Apache-2.0
"""Rows over HTTP in each form of response."""

import base64
import json
import mmap
import socket
import urllib.error
import urllib.request
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support.server import Server

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
    asked = json.dumps({**body(), "stream": streams}).encode()
    for accept in ("multipart/mixed", "application/vnd.apache.arrow.stream"):
        headers = {"Content-Type": "application/json", "Accept": accept}
        url = f"{server.url}/v1/completions"
        request = urllib.request.Request(url, asked, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=120)
        error = json.loads(caught.value.read())["error"]
        assert caught.value.code == 400 and error["param"] == "Accept"
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
    for status in (200, 404):
        request = urllib.request.Request(server.url + path, method="DELETE")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert reply.status == status
        except urllib.error.HTTPError as error:
            assert error.code == status


def test_an_unknown_transport_is_refused(server: Server) -> None:
    status, reply = server.post("/v1/completions", body(transport="pigeon"))
    assert status == 400 and "capture.inline.transport" in json.dumps(reply)


def test_a_stream_carries_rows_in_its_last_chunk(
    server: Server, rows: dict[int, torch.Tensor]
) -> None:
    *before, last = server.stream("/v1/completions", body() | {"max_tokens": 3})
    assert before and all("capture_results" not in chunk for chunk in before)
    for told in last["capture_results"]["inline"]["payload"]:
        found = tensor(base64.b64decode(told["data"]))
        assert torch.equal(found, rows[told["layer"]])


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
    deadline = monotonic() + 30
    while True:
        told = server.get("/v1/capture").body["host_memory"]
        # The worker's first report may come after its first answer.
        if told and told[0]["lent_bytes"] and not told[0]["leases"]:
            break
        assert monotonic() < deadline, told
        sleep(0.3)
    (memory,) = told
    assert memory["held_bytes"] <= memory["budget_bytes"]
    assert memory["overflow_bytes"] == 0


def test_a_client_that_disconnects_affects_no_other(server: Server) -> None:
    where = urlsplit(server.url)
    text = json.dumps(body(hooks=HOOKS)).encode()
    for _ in range(3):
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nAccept: application/safetensors\r\n"
                b"Content-Length: %d\r\n\r\n" % len(text) + text
            )
            client.recv(100)
    test_rows_come_without_a_copy_and_their_memory_comes_back(server)
