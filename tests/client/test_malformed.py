# SPDX-License-Identifier: Apache-2.0
"""Whatever a server answers, the client raises `ClearboxError` and is done soon."""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from clearbox_client import AsyncClient, ClearboxError, Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client._answering import served
from tests.client.test_client import RISK, entry, reply

ROWS = entry(torch.ones(2, 4))


def with_rows(**changes: Any) -> dict[str, Any]:
    document = reply()
    document["capture_results"]["inline"]["payload"] = [{**ROWS, **changes}]
    return document


def header(text: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


META = json.dumps({"__metadata__": {"response": json.dumps(reply())}}).encode()
DOCUMENTS: dict[str, Any] = {
    "null": None,
    "a list": [],
    "a text": "x",
    "no choices": {},
    "choices of another kind": {"choices": 5},
    "an empty choice": {"choices": [[]]},
    "a text that is none": {"choices": [{"text": {"a": 1}}]},
    "results of another kind": reply(capture_results=[1]),
    "a result without a status": reply(capture_results={"inline": {}}),
    "rows without data": with_rows(data=None),
    "rows of no base64": with_rows(data="\x00é"),
    "too few bytes": with_rows(data="AAAA"),
    "an unknown dtype": with_rows(dtype="complex"),
    "a huge shape": with_rows(shape=[10**30, 10**30]),
    "a negative shape": with_rows(shape=[-2, -4]),
    "positions of other rows": with_rows(positions=[1]),
    "positions that are none": with_rows(positions=["a", "b"]),
    "a layer that is none": with_rows(layer={}),
    "a readout of another kind": reply(readouts={"risk": 7}),
    "a readout without its kind": reply(readouts={"risk": {}}),
    "a ragged readout": reply(readouts={"risk": {**RISK, "values": [[1], [1, 2]]}}),
    "no pairs of taps": reply(readouts={"risk": {**RISK, "taps": [1]}}),
    "memory of another kind": with_rows(data=None, shm=5),
    "memory without a token": with_rows(data=None, shm={"path": "/dev/zero"}),
    "memory of many tokens": reply(
        capture_results={
            "inline": {
                "status": "ok",
                "payload": [
                    {**ROWS, "shm": {"token": f"{n}", "path": "/dev/zero"}}
                    for n in range(1000)
                ],
            }
        }
    ),
}
BODIES: dict[str, tuple[str, bytes]] = {
    **{what: ("application/json", json.dumps(one).encode())
       for what, one in DOCUMENTS.items()},
    "no JSON": ("application/json", b"{"),
    "no text": ("application/json", b'{"\xff": 1}'),
    "deep JSON": ("application/json", b"[" * 200_000),
    "a number of many digits": ("application/json", b"1" * 10_000),
    "a page": ("text/html", b"<html>"),
    "rows that are short": ("application/safetensors", b"123"),
    "a long header": ("application/safetensors", header(b"{}", size=1 << 62)),
    "a header without the document": ("application/safetensors", header(b"{}")),
    "a header that is a list": ("application/safetensors", header(b"[]")),
    "offsets that are none": (
        "application/safetensors",
        header(META[:-1] + b', "inline/3_post_block": {"data_offsets": 5}}'),
    ),
}  # fmt: skip


def answered(kind: str, data: bytes, status: int = 200) -> Any:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return httpx.Response(404, json={})
        return httpx.Response(status, headers={"content-type": kind}, content=data)

    return served(answer)


def ask(url: str) -> None:
    with Client(url, model="m") as client:
        client.complete("x", capture={"inline": {}})._repr_html_()


@pytest.mark.parametrize("what", BODIES)
def test_an_answer_that_is_none_is_an_error_of_the_client(what: str) -> None:
    kind, data = BODIES[what]
    if what == "offsets that are none":
        document = with_rows(data=None, part="inline/3_post_block")
        meta = {"__metadata__": {"response": json.dumps(document)}}
        data = header(json.dumps({**meta, "inline/3_post_block": 5}).encode())
    begin = time.monotonic()
    with answered(kind, data) as url, pytest.raises(ClearboxError):
        ask(url)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("what", sorted(DOCUMENTS.keys() - {"no choices"}))
def test_so_is_a_chunk_that_is_none(what: str) -> None:
    event = f"data: {json.dumps(DOCUMENTS[what])}\n\n".encode()
    with answered("text/event-stream", event) as url, Client(url, model="m") as client:
        with pytest.raises(ClearboxError):
            for chunk in client.stream("x"):
                assert isinstance(chunk.text, str)

        async def run() -> None:
            async with AsyncClient(url, model="m") as other:
                async for chunk in other.stream("x"):
                    assert isinstance(chunk.text, str)

        with pytest.raises(ClearboxError):
            asyncio.run(run())


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"data": []}', b'{"data": [{}]}'])
def test_so_are_models_and_tokens_that_are_none(body: bytes) -> None:
    with answered("application/json", body) as url, Client(url) as client:
        with pytest.raises(ClearboxError):
            _ = client.model
        client._model = "m"
        with pytest.raises(ClearboxError):
            client.token_texts([1])


@pytest.mark.parametrize(
    "text",
    [
        " (parameter=" * 100_000,
        " (parameter=a[" * 100_000,
        "x (parameter=" + "a" * 10**6,
        ", value=" * 200_000 + ")",
        "must" * 10**6,
    ],
    ids=range(5),
)
@pytest.mark.parametrize("shape", ["plain", "error", "page"])
def test_a_long_message_is_read_in_no_time(text: str, shape: str) -> None:
    error: Any = {"message": text} if shape == "plain" else {"error": text}
    data = text.encode() if shape == "page" else json.dumps(error).encode()
    with answered("application/json", data, 400) as url, Client(url) as client:
        begin = time.monotonic()
        with pytest.raises(ClearboxError) as caught:
            client.models()
        assert len(caught.value.message) <= 1 << 16
        assert caught.value.remedy is None or caught.value.remedy
        assert time.monotonic() - begin < 3


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["data", "shape", "dtype", "positions", "kind", "status",
                         "payload", "message", "error", "text", "taps"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = ["choices", "capture_results", "readouts", "steering", "prompt_token_ids"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(FIELDS), value=anything, deeper=st.booleans())
def test_a_field_of_any_kind_is_read_or_refused(
    name: str, value: Any, deeper: bool
) -> None:
    value = {"inline": value} if deeper else value
    data = json.dumps(with_rows() | {name: value}).encode()
    with answered("application/json", data) as url, suppress(ClearboxError):
        ask(url)
