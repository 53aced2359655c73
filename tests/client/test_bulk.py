# SPDX-License-Identifier: Apache-2.0
"""Rows in binary form, in shared memory, without a copy."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from clearbox_client import AsyncClient, ClearboxError, Client, bulk, shared
from clearbox_client.payloads import decode

from tests.client._answering import served
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.transport.bodies import FORMS, form_for
from vllm.v1.capture.transport.handouts import Handout, Handouts
from vllm.v1.capture.transport.parts import Part, described, parts_of
from vllm.v1.capture.types import CaptureResult, VllmInternalRequestId

CAPTURE = {"inline": {"hooks": {"post_block": "all"}}}
SHM = {"inline": {**CAPTURE["inline"], "transport": "shm"}}
TAPS = ((1, "post_block"), (2, "post_block"))


def payload_of(dtype: torch.dtype, widths: Sequence[int] = (8, 8)) -> RowsByTap:
    payload = RowsByTap()
    for tap, width in zip(TAPS, widths):
        facts = {"positions": [0, 1, 2], "token_ids": [7, None, 9]}
        payload.put(tap, torch.randn(3, width).to(dtype), facts)
    return payload


class Answers:
    """A server that returns the rows of a payload, and frees shared memory."""

    def __init__(self, payload: RowsByTap) -> None:
        key = VllmInternalRequestId("r"), -1, "*"
        result = CaptureResult(key, "ok", payload=payload)  # type: ignore[arg-type]
        self.payload = payload
        self.parts = parts_of({"inline": result})
        self.handouts = Handouts(1 << 20)
        self.handed: Handout | None = None
        self.freed: list[bool] = []

    def tell(self, reference: Callable[[Part], dict[str, Any]]) -> dict[str, Any]:
        entries = [described(part, reference) for part in self.parts]
        results = {"inline": {"status": "ok", "error": None, "payload": entries}}
        return {"choices": [{"text": "é"}], "capture_results": results}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            self.freed.append(self.handouts.free(request.url.path.rpartition("/")[2]))
            return httpx.Response(200 if self.freed[-1] else 404, json={})
        asked = json.loads(request.content)
        if asked["capture"]["inline"].get("transport") == "shm":
            return self._shared(asked)
        form = form_for(request.headers["accept"])
        body = FORMS[form](self.tell, self.parts)
        headers = {"content-type": body.media_type}
        return httpx.Response(200, headers=headers, content=b"".join(body.pieces))

    def _shared(self, asked: Any) -> httpx.Response:
        handed = self.handed = self.handouts.make(self.parts)
        assert handed is not None

        def refer(part: Part) -> dict[str, Any]:
            told = handed.refer(part)
            assert told is not None
            return told

        document = self.tell(refer)
        if asked.get("stream"):
            text = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"
            return httpx.Response(200, text=text)
        return httpx.Response(200, json=document)


@contextmanager
def client_of(server: Answers) -> Iterator[Client]:
    with served(server) as url, Client(url, model="m") as client:
        yield client


def bits(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("capture", [CAPTURE, SHM])
def test_rows_are_writable_views_and_numbers_on_demand(
    dtype: torch.dtype, capture: Any
) -> None:
    server = Answers(payload_of(dtype))
    with client_of(server) as client:
        reply = client.complete("x", capture=capture)
    assert reply.text == "é" and tuple(reply.rows) == TAPS
    for tap, rows in reply.rows.items():
        assert rows.stored.tobytes() == bits(server.payload[tap])
        assert rows.stored.base is not None and rows.stored.flags.writeable
        assert np.array_equal(rows.values, server.payload[tap].float().numpy())
        assert rows.values is rows.values and len(rows) == 3
        assert (rows.values is rows.stored) == (dtype != torch.bfloat16)
        rows.stored[:] = 0
    for tap in TAPS:  # The server's rows are its own.
        assert server.payload[tap].any()


def test_the_asynchronous_client_gets_the_same() -> None:
    server = Answers(payload_of(torch.bfloat16))

    async def run() -> list[Any]:
        with served(server) as url:
            async with AsyncClient(url, model="m") as client:
                whole = await client.complete("x", capture=CAPTURE)
                mapped = await client.complete("x", capture=SHM)
                chunks = [chunk async for chunk in client.stream("x", capture=SHM)]
                return [whole.rows, mapped.rows, chunks[-1].rows]

    for rows in asyncio.run(run()):
        for tap in TAPS:
            assert rows[tap].stored.tobytes() == bits(server.payload[tap])
    assert server.freed == [True, True] and not server.handouts.held_bytes


@pytest.mark.parametrize("name", [n for n in vars(Client) if not n.startswith("_")])
def test_the_asynchronous_client_has_every_method(name: str) -> None:
    method = getattr(AsyncClient, name, None)
    others = {"stream", "close", "patch_events", "model"}
    assert name in others or method.__wrapped__ is getattr(Client, name)


def test_shared_memory_is_freed_at_once_and_its_rows_stay() -> None:
    server = Answers(payload_of(torch.float32))
    with client_of(server) as client:
        reply = client.complete("x", capture=SHM)
        assert server.freed == [True] and not server.handouts.held_bytes
        (chunk,) = client.stream("x", capture=SHM)
    assert server.freed == [True, True]
    for rows in (reply.rows, chunk.rows):
        for tap in TAPS:
            assert rows[tap].stored.tobytes() == bits(server.payload[tap])
    (entry, _) = reply.captures["inline"].payload
    assert "shm" not in entry
    assert np.array_equal(
        decode(reply.captures["inline"].payload)[TAPS[0]], reply.rows[TAPS[0]].values
    )


def test_memory_that_expired_meanwhile_is_no_error() -> None:
    server = Answers(payload_of(torch.float32))
    server.handouts.free = lambda token: False  # type: ignore[method-assign]
    with client_of(server) as client:
        assert len(client.complete("x", capture=SHM).rows) == 2
    assert server.freed == [False]


def test_what_cannot_be_mapped_is_refused_and_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host the path may exist, as another file of another process."""
    other = tmp_path / "3"
    other.symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(bytes(4096))
    for path in (str(other), "/proc/0/fd/3"):
        server = Answers(payload_of(torch.float32))
        monkeypatch.setattr(
            Handout,
            "refer",
            lambda handout, part, path=path: {
                "shm": {"path": path, "offset": 0, "nbytes": 96, "token": handout.token}
            },
        )
        with client_of(server) as client, pytest.raises(ClearboxError) as caught:
            client.complete("x", capture=SHM)
        assert caught.value.parameter == "transport"
        assert caught.value.remedy and "omit the transport" in caught.value.remedy
        assert server.freed == [True]


def test_the_name_of_the_memory_is_the_servers() -> None:
    server = Answers(payload_of(torch.float32))
    handed = server.handouts.make(server.parts)
    assert handed is not None
    path = f"/proc/self/fd/{handed.files[0].number}"
    assert os.readlink(path).startswith(shared.NAME)


def test_only_requests_for_rows_ask_for_safetensors() -> None:
    assert bulk.accept_of({}) == {}
    body: dict[str, Any] = {"capture": {"inline": {"hooks": {"post_block": [1]}}}}
    assert bulk.accept_of(body)["Accept"].startswith("application/safetensors")
    assert bulk.accept_of({**body, "stream": True}) == {}
