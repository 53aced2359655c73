# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.entrypoints.serve.utils.residual_fields import FIELDS
from vllm.exceptions import VLLMValidationError
from vllm.v1.capture.frontend.http import response_results, stamp
from vllm.v1.capture.types import CaptureResult


def result(status: Any = "ok", payload: Any = None) -> CaptureResult:
    return CaptureResult(("r", -1, "*"), status, None, payload)  # type: ignore[arg-type]


def output(request_id: str = "cmpl-7-0", **results: CaptureResult) -> Any:
    return SimpleNamespace(
        request_id=request_id, finished=True, capture_results=results or None
    )


SPEC = {"filesystem": {"request_id": "x", "hooks": {"post_block": [0]}}}


def other_requests() -> list[Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    message = {"role": "user", "content": "x"}
    return [
        (AnthropicMessagesRequest, {"messages": [message], "max_tokens": 1}),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {}}),
    ]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("kind", "body"), other_requests())
def test_no_request_ignores_our_fields(kind: Any, body: Any, field: str) -> None:
    kind.model_validate({"model": "demo", **body})
    with pytest.raises(
        VLLMValidationError, match=f"{field}: {kind.__name__} has no such"
    ):
        kind.model_validate({"model": "demo", **body, field: SPEC})


def test_results_of_several_prompts_are_by_prompt() -> None:
    outputs = [output(files=result("ok", ["a"])), output(files=result("error"))]
    reply = response_results(outputs)
    assert reply is not None
    assert reply["files"]["status"] == "partial_error"
    assert reply["files"]["payload"] == {"0": ["a"], "1": None}
    assert reply["files"]["key"] == ["cmpl-7", -1, "*"]


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"x": float("nan"), "y": [float("-inf"), 1.5]}, {"x": None, "y": [None, 1.5]}),
        ({}, {}),
        ({(1, "pre_attn"): 2}, [{"layer": 1, "hook": "pre_attn", "value": 2}]),
        ({("one",): 1, (1, 2, 3): 4}, {"('one',)": 1, "(1, 2, 3)": 4}),
        (torch.arange(3).bfloat16(), [0.0, 1.0, 2.0]),
        ({"rows": np.ones((1, 2)), "n": np.float32(0.5)}, {"rows": [[1, 1]], "n": 0.5}),
        (b"ab", "YWI="),
        ("a\ud800", "a\\ud800"),
    ],
)
def test_every_payload_becomes_json(payload: Any, told: Any) -> None:
    reply = response_results([output(files=result(payload=payload))])
    assert reply is not None
    assert reply["files"]["payload"] == told
    json.dumps(reply, allow_nan=False, ensure_ascii=False).encode()


def test_an_error_becomes_json_whatever_its_text() -> None:
    failed = CaptureResult(("r", -1, "*"), "error", "no file a\udcff")  # type: ignore[arg-type]
    reply = response_results([output(files=failed)])
    assert reply is not None
    assert reply["files"]["error"] == "no file a\\udcff"


def test_nothing_captured_is_no_field() -> None:
    assert response_results([output(), None]) is None


def test_the_last_part_of_an_output_with_results_is_stamped() -> None:
    chunk = SimpleNamespace(capture_results=None)
    ending = output(files=result())
    ending.outputs = first, last = [SimpleNamespace(), SimpleNamespace()]
    stamp(chunk, ending, first)
    assert chunk.capture_results is None
    before = output()
    before.outputs, before.finished = [last], False
    stamp(chunk, before, last)
    assert chunk.capture_results is None
    stamp(chunk, ending, last)
    assert chunk.capture_results["files"]["status"] == "ok"
