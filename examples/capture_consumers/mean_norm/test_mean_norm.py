# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mean_norm import MeanNorm

from vllm.v1.capture.consumer import BatchingSink
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    VllmInternalRequestId,
)

REQUEST = VllmInternalRequestId("r")


def context() -> CaptureContext:
    return CaptureContext(REQUEST, 5, 0, 6, 4, 4, 1, 1)


def test_a_request_names_layers() -> None:
    spec = MeanNorm(None, {"hook": "pre_attn"}).validate_client_spec(
        {"layers": [0, 5]}, context()
    )
    assert spec.hooks == {"pre_attn": [0, 5]} and spec.positions == "all"


@pytest.mark.parametrize("raw", [None, {}, {"layers": []}, {"layers": "all"}, [1]])
def test_anything_else_is_refused_with_the_remedy(raw: object) -> None:
    with pytest.raises(ValueError, match="layers from 0 to 5"):
        MeanNorm(None, {}).validate_client_spec(raw, context())


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="layer"):
        MeanNorm(None, {"layer": 3})


def test_the_payload_is_the_mean_length() -> None:
    # The framework's adapter collects chunks and calls the consumer, as in a server.
    sink = BatchingSink(MeanNorm(None, {}))
    key: CaptureKey = (REQUEST, 3, "post_block")
    for offset, length in enumerate((3.0, 5.0)):
        row = torch.tensor([[length, 0.0]])
        sink.submit_chunk(CaptureChunk(key, row, row.dtype, offset, offset))
    sink.submit_finalize(CaptureFinalize(key))
    result = sink.get_result(key)
    assert result is not None and result.status == "ok"
    assert result.payload == {"3": 4.0}
