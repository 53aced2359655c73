# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies of the capture tests."""

from typing import Any

import torch
from hypothesis import strategies as st

from vllm.v1.capture.dispatch.row_buffer import Rows
from vllm.v1.capture.types import CaptureContext, VllmInternalRequestId
from vllm.v1.residual.capture_plan import CapturePlan, group_taps
from vllm.v1.residual.spans import OPEN_END, Spans, spans_of
from vllm.v1.residual.tap import Tap

HOOKS = ("pre_attn", "post_attn", "post_block")


def context(**changes: Any) -> CaptureContext:
    """A request to a model with the three hook points in every layer."""
    values: dict[str, Any] = {
        "vllm_internal_request_id": VllmInternalRequestId("r"),
        "num_prompt_tokens": 5,
        "num_computed_tokens": 0,
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "element_size_bytes": 4,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_tokens": 4,
        "hook_points": dict.fromkeys(range(4), HOOKS),
    }
    return CaptureContext(**values | changes)


def taps(num_layers: int = 3) -> st.SearchStrategy[Tap]:
    return st.tuples(st.integers(0, num_layers - 1), st.sampled_from(HOOKS))


def ranges(num_prompt_tokens: int, end: int) -> st.SearchStrategy[Spans]:
    """Random position ranges of a request."""
    prompt = num_prompt_tokens
    named = st.sampled_from(
        [
            ((prompt - 1, prompt),),
            ((0, prompt),),
            ((prompt, OPEN_END),),
            ((0, OPEN_END),),
        ]
    )
    listed = st.sets(st.integers(0, max(end - 1, 0)), min_size=1).map(spans_of)
    return named | listed


def wanted(
    num_prompt_tokens: int, end: int
) -> st.SearchStrategy[dict[str, dict[Tap, Spans]]]:
    """Random ranges of up to three instances, per tap."""
    specs = st.tuples(
        st.sets(taps(), min_size=1, max_size=4), ranges(num_prompt_tokens, end)
    ).map(lambda spec: dict.fromkeys(sorted(spec[0]), spec[1]))
    return st.dictionaries(st.sampled_from("abc"), specs, min_size=1, max_size=3)


def plan_for(want: dict[str, dict[Tap, Spans]], num_prompt_tokens: int) -> CapturePlan:
    return CapturePlan(
        client_request_id="client",
        num_prompt_tokens=num_prompt_tokens,
        groups=group_taps(want),
        reply_to="",
    )


def positions(ranges_: Spans, end: int) -> list[int]:
    """The positions below `end` in `ranges_`, found by testing each."""
    return [p for p in range(end) if any(a <= p < b for a, b in ranges_)]


def rows_of_step(start: int, tensor: torch.Tensor, step: int) -> Rows:
    """All of `tensor`, `[taps, num_rows, hidden_size]`, computed by one step."""
    return Rows(start, tensor.shape[1], tensor, 0, step)
