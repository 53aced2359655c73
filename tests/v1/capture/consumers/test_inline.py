# SPDX-License-Identifier: Apache-2.0
import base64

import pytest
import torch

from tests.v1.capture.consumers._drive import context, deliver, rows_of
from vllm.v1.capture.consumer import BatchingSink
from vllm.v1.capture.consumers.inline import InlineConsumer
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.http import as_json
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.transport.zmq_channel import ResultMessage
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

TAPS = {(0, "pre_attn"): 3, (2, "post_block"): 5}


def captured(dtype: torch.dtype = torch.bfloat16):
    rows = {tap: rows_of(n, 8, n, dtype) for tap, n in TAPS.items()}
    consumer = BatchingSink(InlineConsumer(None, {}))
    results = deliver(consumer, {"r": rows}, chunk_rows=2, client_spec={"hooks": {}})
    return rows, results["r"]


def test_rows_survive_the_way_between_processes() -> None:
    rows, result = captured()
    message = ResultMessage.of("r", "inline", 0, result)
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
    decoder = MsgpackDecoder(ResultMessage, share_mem=False)
    payload = decoder.decode(frames).result().payload
    assert isinstance(payload, RowsByTap)
    for tap, tensor in rows.items():
        assert torch.equal(payload[tap], tensor)
        payload[tap].add_(1)  # the receiver's own memory
    assert payload.positions == result.payload.by_tap().positions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_http_data_is_exact(dtype: torch.dtype) -> None:
    rows, result = captured(dtype)
    result.payload = result.payload.by_tap()
    entries = as_json({"inline": result})["inline"]["payload"]
    assert {(e["layer"], e["hook"]) for e in entries} == rows.keys()
    for entry in entries:
        data = base64.b64decode(entry["data"])
        tensor = rows[entry["layer"], entry["hook"]]
        got = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry["dtype"]))
        assert torch.equal(got.view(entry["shape"]), tensor)
        assert entry["positions"] == list(range(len(tensor)))


def test_a_request_without_bound_is_refused() -> None:
    consumer = InlineConsumer(None, {})
    raw = {"hooks": {"post_block": [0]}, "positions": "all_generated"}
    with pytest.raises(CaptureValidationError, match="max_tokens"):
        consumer.validate_client_spec(raw, context(max_tokens=None))
    prompt_only = {**raw, "positions": "all_prompt"}
    consumer.validate_client_spec(prompt_only, context(max_tokens=None))


@pytest.mark.parametrize(
    ("params", "said"),
    [({"max_bytes": 1}, "unknown parameter"), ({"max_request_bytes": 0}, "above 0")],
)
def test_wrong_parameters_are_refused(params: dict[str, int], said: str) -> None:
    with pytest.raises(CaptureValidationError, match=said):
        InlineConsumer(None, params)


@pytest.mark.parametrize(
    ("key", "said"),
    [("transport", r"must be one of \['http', 'shm'\]"), ("encoding", "safetensors")],
)
def test_an_unknown_way_to_the_client_is_refused(key: str, said: str) -> None:
    raw = {"hooks": {"post_block": [0]}, key: "zstd"}
    with pytest.raises(CaptureValidationError, match=said):
        InlineConsumer(None, {}).validate_client_spec(raw, context())
