# SPDX-License-Identifier: Apache-2.0
"""The parts of the Inspect providers that work without Inspect."""

import base64
import json
from typing import Any

import httpx2
import torch

from vllm.interop.inspect_ai import responses as requests
from vllm.interop.inspect_ai.activations import (
    TensorPayload,
    activations_of,
    without_rows,
)
from vllm.interop.inspect_ai.responses import document_in
from vllm.interop.vllm_lens import SteeringVector, tensors
from vllm.v1.capture.transport.bodies import as_safetensors
from vllm.v1.capture.transport.parts import Part


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
    part = Part("0", 4, "pre_attn", rows, [0, 1, 2], [5, 6, 7], "http")
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
