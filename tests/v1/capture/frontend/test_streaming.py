# SPDX-License-Identifier: Apache-2.0
"""Rows of outputs before the last: each once, and none that may become invalid."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.request_tracker import RequestTracker
from vllm.v1.capture.frontend.streaming import LiveRequest, carries_rows
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.types import VllmInternalRequestId
from vllm.v1.residual.capture_plan import LIVE, CapturePlan, Reader, TapGroup
from vllm.v1.residual.spans import OPEN_END, Spans

PROMPT = [50, 51, 52, 53]
TAP, OTHER = (2, "post_block"), (5, "post_block")
ALL: Spans = ((0, OPEN_END),)


def plan(ranges: Spans = ALL, samples: int = 1) -> CapturePlan:
    readers = Reader("inline", ranges), Reader(LIVE, ranges)
    return CapturePlan(
        client_request_id="r",
        num_prompt_tokens=len(PROMPT),
        groups=(TapGroup((TAP, OTHER), ranges, readers),),
        reply_to="nowhere",
        num_samples=samples,
    )


def chunk(start: int, stop: int, taps: tuple[Any, ...] = (TAP, OTHER)) -> GroupChunk:
    """Rows with their position, and 100 more at each further tap."""
    positions = list(range(start, stop))
    rows = torch.tensor(positions, dtype=torch.float32)[:, None].repeat(1, 3)
    whole = torch.stack([rows + 100 * i for i in range(len(taps))])
    return group_chunk(taps, whole, positions)


def group_chunk(taps: Any, rows: torch.Tensor, positions: list[int]) -> GroupChunk:
    request_id = VllmInternalRequestId("r-1")
    return GroupChunk(request_id, taps, rows, positions[0], 0, positions)


def output(*token_ids: list[int]) -> Any:
    outputs = [
        SimpleNamespace(index=index, token_ids=ids)
        for index, ids in enumerate(token_ids)
    ]
    nothing = {"capture_results": None, "finished": False}
    return SimpleNamespace(request_id="r", outputs=outputs, **nothing)


def opened(kind: RequestOutputKind, ranges: Spans = ALL) -> LiveRequest:
    return LiveRequest(plan(ranges), PROMPT, kind, ["inline"])


def rows_in(request: LiveRequest, tokens: list[int]) -> Any:
    (result,) = request.show(output(tokens)).values()
    assert result.status == "pending"
    return result.payload


@given(
    data=st.data(),
    num_generated=st.integers(1, 12),
    kind=st.sampled_from([RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA]),
)
def test_however_rows_and_tokens_come_in_each_row_is_shown_once_in_order(
    data: st.DataObject, num_generated: int, kind: RequestOutputKind
) -> None:
    tokens = [100 + i for i in range(num_generated)]
    fed = [*PROMPT, *tokens]
    request = opened(kind)
    shown: list[int] = []
    computed, sent = 0, 0
    while sent < num_generated:
        more = data.draw(st.integers(0, len(fed) - computed), label="rows")
        if more:
            request.put(0, [chunk(computed, computed + more)])
            computed += more
        new = data.draw(st.integers(1, num_generated - sent), label="tokens")
        delta = kind == RequestOutputKind.DELTA
        rows = rows_in(request, tokens[sent if delta else 0 : sent + new])
        sent += new
        positions = rows.positions.get(TAP, [])
        shown = shown + positions if delta else positions
        assert shown == list(range(min(computed, len(PROMPT) + sent - 1)))
        assert rows.token_ids.get(TAP, []) == [fed[p] for p in positions]
        if positions:
            assert rows[TAP][:, 0].tolist() == positions
            assert rows[OTHER][:, 0].tolist() == [100 + p for p in positions]
            assert rows.positions[OTHER] is rows.positions[TAP]


def test_what_was_shown_does_not_change_when_more_comes() -> None:
    request = opened(RequestOutputKind.CUMULATIVE)
    request.put(0, [chunk(0, 4)])
    first = rows_in(request, [7])
    before = first[TAP].clone()
    for start in range(4, 40):
        request.put(0, [chunk(start, start + 1)])
        rows_in(request, [7] * (start - 2))
    assert torch.equal(first[TAP], before)
    assert first.positions[TAP] == [0, 1, 2, 3]


def test_each_instance_gets_the_positions_that_it_reads() -> None:
    both = (Reader("a", ((0, 2),)), Reader("b", ((1, 3),)), Reader(LIVE, ((0, 3),)))
    made = CapturePlan("r", 4, (TapGroup((TAP,), ((0, 3),), both),), "nowhere")
    request = LiveRequest(made, PROMPT, RequestOutputKind.DELTA, ["a", "b"])
    request.put(0, [chunk(0, 3, (TAP,))])
    results = request.show(output([7]))
    assert results["a"].payload.positions[TAP] == [0, 1]
    assert results["b"].payload.positions[TAP] == [1, 2]
    assert results["b"].payload[TAP][:, 0].tolist() == [1.0, 2.0]


def test_a_prompt_of_embeddings_has_no_token_ids() -> None:
    request = LiveRequest(plan(), None, RequestOutputKind.DELTA, ["inline"])
    request.put(0, [chunk(0, 5)])
    assert rows_in(request, [7, 8]).token_ids[TAP] == [None] * 4 + [7]


@pytest.mark.parametrize(
    ("params", "streaming"),
    [
        (SamplingParams(), True),
        (SamplingParams(output_kind=RequestOutputKind.DELTA), True),
        (SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), False),
        (SamplingParams(capture_stream=False), False),
        (SamplingParams.from_optional(), False),  # the form of HTTP requests
    ],
)
def test_only_outputs_that_are_read_one_by_one_carry_rows(
    params: SamplingParams, streaming: bool
) -> None:
    assert carries_rows(params) == streaming


def test_after_its_last_output_a_request_has_no_rows_waiting() -> None:
    tracker = RequestTracker(PathLocks({}), 1, lambda *_: None)
    with tracker.lock:
        tracked = tracker.begin("r", 0, "r-1", ("inline",))
    tracker.put_live(chunk(0, 4))  # Its plan has no live reader.
    tracker.show_live("r", first := output([7]))
    assert first.capture_results is None
    tracked.live = opened(RequestOutputKind.CUMULATIVE)
    tracker.put_live(chunk(0, 4))
    tracker.show_live("r", made := output([7]))
    assert made.capture_results["inline"].payload.positions[TAP] == [0, 1, 2, 3]
    last = output([7, 8])
    last.finished = True
    tracker.show_live("r", last)
    tracker.put_live(chunk(4, 5))
    assert last.capture_results is tracked.live is None


def test_rows_of_some_heads_are_shown() -> None:
    reader = Reader("inline", ALL, heads=(2, 0), head_size=1)
    group = TapGroup((TAP,), ALL, (reader, Reader(LIVE, ALL)))
    own = CapturePlan("r", len(PROMPT), (group,), "nowhere")
    request = LiveRequest(own, PROMPT, RequestOutputKind.CUMULATIVE, ["inline"])
    rows = torch.randn(4, 3)
    request.put(0, [group_chunk((TAP,), rows[None], [0, 1, 2, 3])])
    assert torch.equal(rows_in(request, [7])[TAP], rows[:, [2, 0]])
