# SPDX-License-Identifier: Apache-2.0
"""The parts of the Inspect providers that work without Inspect."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx2
import pytest
import torch

from vllm.interop.inspect_ai import requests
from vllm.interop.inspect_ai.activations import (
    TensorPayload,
    activations_of,
    without_rows,
)
from vllm.interop.inspect_ai.connection import Connection
from vllm.interop.inspect_ai.exchange import BodyStream
from vllm.interop.inspect_ai.responses import accept_of, document_in
from vllm.interop.vllm_lens import SteeringVector, tensors
from vllm.v1.capture.transport.bodies import as_safetensors
from vllm.v1.capture.transport.parts import Part

Result = TypeVar("Result")


def test_extra_args_become_xargs_and_other_fields_stay() -> None:
    vector = SteeringVector(activations=torch.ones(1, 4), layer_indices=[2])
    extra = {
        "extra_args": {
            "output_residual_stream": [3, 1],
            "apply_steering_vectors": [vector],
        },
        "vllm_xargs": {"other": 1.5},
        "steering_vectors": {"post_block": {1: torch.zeros(2)}},
        "lora_request": {"lora_name": "mine", "lora_int_id": 1},
    }
    body = requests.body_of(extra)
    assert set(body) == {"vllm_xargs", "steering_vectors", "return_token_ids"}
    assert body["steering_vectors"] == {"post_block": {"1": [0.0, 0.0]}}
    assert body["vllm_xargs"]["other"] == 1.5
    assert json.loads(body["vllm_xargs"]["output_residual_stream"]) == [3, 1]
    (sent,) = json.loads(body["vllm_xargs"]["apply_steering_vectors"])
    assert torch.equal(SteeringVector(**sent).activations, torch.ones(1, 4))
    assert requests.layers_of(extra) == [1, 3]
    assert requests.lora_name(extra) == "mine"
    shown = json.dumps(requests.shown(body))
    assert sent["activations"]["data"] not in shown
    assert "<text of" in shown


def test_all_layers_are_none() -> None:
    assert requests.layers_of({}) is None
    args = {"output_residual_stream": True}
    assert requests.layers_of({"extra_args": args}) is None
    args = {"output_residual_stream": "[2]"}
    assert requests.layers_of({"vllm_xargs": args}) == [2]
    args = {"output_residual_stream": "[2"}
    assert requests.layers_of({"vllm_xargs": args}) is None


def test_activations_have_the_keys_of_both_systems() -> None:
    stack = torch.randn(2, 5, 4).bfloat16()
    rows = torch.randn(3, 4)
    packed = base64.b64encode(rows.numpy().tobytes()).decode()
    entry = {"layer": 4, "hook": "pre_attn", "shape": [3, 4], "dtype": "float32"}
    inline = {"status": "ok", "payload": [{**entry, "data": packed}]}
    written = {"status": "ok", "payload": ["/data/one.bin"]}
    response = {
        "activations": {"residual_stream": tensors.encode(stack)},
        "capture_results": {"inline": inline, "filesystem": written},
    }
    found = activations_of(response, [1, 3])
    assert set(found) == {
        "residual_stream",
        "1:resid_post",
        "3:resid_post",
        "4:resid_pre",
    }
    assert torch.equal(found["residual_stream"], stack)
    payload = found["3:resid_post"]
    assert payload["dtype"] == "bfloat16" and payload["shape"] == [5, 4]
    data = bytearray(base64.b64decode(payload["data"]))
    assert torch.equal(
        torch.frombuffer(data, dtype=torch.bfloat16).view(5, 4), stack[1]
    )
    assert torch.equal(found["4:resid_pre"].tensor, rows)
    assert dict(payload) == {name: payload[name] for name in payload}
    assert without_rows(response["capture_results"]) == {
        "inline": {"status": "ok"},
        "filesystem": written,
    }
    assert activations_of({}, None) == {}


def test_what_inspect_does_not_know_it_does_not_write() -> None:
    from pydantic_core import to_jsonable_python

    payload = TensorPayload(torch.ones(2, 2))
    told = to_jsonable_python({"one": payload}, fallback=lambda _: None)
    assert told == {"one": None}


def test_rows_are_read_from_safetensors() -> None:
    rows = torch.randn(3, 4)
    part = Part("0", 4, "pre_attn", rows, [0, 1, 2], [5, 6, 7], None, "http")
    entry = {"layer": 4, "hook": "pre_attn", "shape": [3, 4], "dtype": "float32"}

    def tell(refer: Any) -> Any:
        inline = {"status": "ok", "payload": [{**entry, **refer(part)}]}
        return {"id": "one", "capture_results": {"inline": inline}}

    body = as_safetensors(tell, [part])
    content = b"".join(bytes(piece) for piece in body.pieces)
    headers = {"content-type": body.media_type}
    document = document_in(httpx2.Response(200, headers=headers, content=content))
    assert document["id"] == "one"
    payload = activations_of(document, None)["4:resid_pre"]
    assert torch.equal(payload.tensor, rows)
    assert without_rows(document["capture_results"]) == {"inline": {"status": "ok"}}


def test_only_requests_for_plain_rows_ask_for_safetensors() -> None:
    assert accept_of({}) == {}
    capture = {"inline": {"hooks": {"post_block": [1]}}}
    assert accept_of({"capture": capture})["Accept"].startswith("application/safe")
    capture["inline"]["encoding"] = "zstd"
    assert accept_of({"capture": capture}) == {}


def with_server(
    replies: list[list[bytes]],
    use: Callable[[Connection], Awaitable[Result]],
    *,
    closes: bool = False,
) -> Result:
    """Use a connection to a server that answers requests with pieces of bytes."""

    async def serve(reader: Any, writer: Any) -> None:
        for pieces in replies:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        if closes:
            writer.close()

    async def run() -> Result:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, *place)
        try:
            return await use(connection)
        finally:
            connection.close()
            server.close()

    return asyncio.run(run())


ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


def test_a_connection_is_kept_after_a_whole_response() -> None:
    first = [b"HTTP/1.1 100 Continue\r\n\r\n", OK, b"Content-Length: 4\r\n\r\nab"]
    last = [OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n"]

    async def use(connection: Connection) -> None:
        response = await connection.ask(ASK, 60)
        assert response.status_code == 200 and response.content == b"abcd"
        assert connection.finish() and connection.is_usable(60)
        assert not connection.is_usable(-1)
        response = await connection.ask(ASK, None)
        assert response.content == b"" and response.reason_phrase == "OK"
        assert not connection.finish() and not connection.is_usable(None)

    with_server([[*first, b"cd"], last], use)


CHUNKED = [OK + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\nab\r\n"]
TO_THE_END = [OK + b"\r\nab", b"cd"]


@pytest.mark.parametrize(
    ("pieces", "closes"),
    [([*CHUNKED, b"2\r\ncd\r\n0\r\n\r\n"], False), (TO_THE_END, True)],
    ids=["chunked", "until the end of the connection"],
)
def test_a_body_of_unknown_length_is_a_stream(
    pieces: list[bytes], closes: bool
) -> None:
    async def use(connection: Connection) -> tuple[bytes, bool]:
        response = await connection.ask(ASK, 60)
        assert isinstance(response.stream, BodyStream)
        return await response.aread(), connection.finish()

    assert with_server([pieces], use, closes=closes) == (b"abcd", not closes)


@pytest.mark.parametrize(
    ("pieces", "closes", "error"),
    [
        ([], True, httpx2.RemoteProtocolError),
        ([OK + b"Content-Length: 4\r\n\r\nab"], True, httpx2.RemoteProtocolError),
        (CHUNKED, True, httpx2.RemoteProtocolError),
        ([b"no HTTP at all\r\n"], False, httpx2.RemoteProtocolError),
        ([OK], False, httpx2.ReadTimeout),
    ],
    ids=["no response", "cut", "cut stream", "no HTTP", "silent"],
)
def test_a_failing_connection_raises(
    pieces: list[bytes], closes: bool, error: type[Exception]
) -> None:
    async def use(connection: Connection) -> None:
        seconds = 0.05 if error is httpx2.ReadTimeout else 60
        with pytest.raises(error):
            await (await connection.ask(ASK, seconds)).aread()
        assert not connection.finish()

    with_server([pieces], use, closes=closes)
