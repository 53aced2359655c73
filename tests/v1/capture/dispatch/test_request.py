# SPDX-License-Identifier: Apache-2.0
from collections import defaultdict
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._simulation import WIDTH, Life, Step, lives
from tests.v1.capture._strategies import plan_for, positions, rows_of_step, wanted
from vllm.v1.capture.dispatch.request import CapturedRequest, never_started
from vllm.v1.capture.dispatch.row_buffer import Rows
from vllm.v1.capture.groups import GroupChunk, chunks_in
from vllm.v1.capture.types import CaptureChunk, CaptureFinalize, CaptureResult
from vllm.v1.residual.capture_plan import CaptureEnd, CapturePlan
from vllm.v1.residual.readout_plan import (
    Readout,
    ReadoutPlan,
    ReadoutReader,
    ReadoutRows,
)
from vllm.v1.residual.row_blocks import local_groups
from vllm.v1.residual.spans import OPEN_END, overlap


class Consumers:
    """The rows of every instance, per key."""

    def __init__(self) -> None:
        self.chunks: dict[Any, list[CaptureChunk]] = defaultdict(list)
        self.finalizes: dict[Any, CaptureFinalize] = {}

    def take(self, rows: dict[str, list[GroupChunk]]) -> None:
        for instance, batch in rows.items():
            for chunk in chunks_in(batch):
                self.chunks[instance, chunk.key[1:]].append(chunk)

    def rows(self, instance: str, tap: Any) -> list[tuple[int, float]]:
        """The valid rows, according to the sidecar."""
        rows = []
        for chunk in self.chunks[instance, tap]:
            assert chunk.row_offset == len(rows), "rows are missing or repeated"
            rows += list(zip(chunk.metadata["positions"], chunk.tensor[:, 0].tolist()))
        return rows[: self.finalizes[instance, tap].sidecar["num_rows"]]


class Page:
    """Memory for the rest of a prompt, which following steps fill."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._end = num_prompt_tokens
        self._memory = torch.empty(0)
        self._start = self._next = num_prompt_tokens

    def place(self, rows: Rows) -> Rows:
        """The same rows in the page; those of generated tokens stay where they are."""
        if rows.stop > self._end:
            return rows
        if rows.start != self._next:
            shape = len(rows.memory), self._end - rows.start, WIDTH
            self._memory, self._start = torch.full(shape, torch.nan), rows.start
        self._next, first = rows.stop, rows.start - self._start
        placed = rows._replace(memory=self._memory, first=first)
        placed.tensor.copy_(rows.tensor)
        return placed


def run(
    plan: CapturePlan,
    life: Life,
    reason: str,
    early: frozenset[str],
    paged: bool = False,
) -> Consumers:
    taps = [tap for group in plan.groups for tap in group.taps]
    groups = local_groups(plan, {tap: i for i, tap in enumerate(taps)})
    prompt = list(range(100, 100 + life.num_prompt_tokens))
    request = CapturedRequest("r", plan, groups, prompt, {}, {}, early)
    consumers = Consumers()
    pages = [Page(life.num_prompt_tokens) for _ in groups]
    for number, step in enumerate(life.steps):
        for index, group in enumerate(groups):
            for rows in step_rows(step, group.ranges, len(group.taps), number):
                placed = pages[index].place(rows) if paged else rows
                consumers.take(request.add(index, placed))
    chunks, endings = request.finish(end_of(life, reason), unanswered)
    consumers.take(chunks)
    for instance, ending in endings.items():
        for finalize in ending.finalizes:
            consumers.finalizes[instance, finalize.key[1:]] = finalize
    return consumers


def step_rows(step: Step, ranges: Any, taps: int, number: int) -> list[Rows]:
    return [
        rows_of_step(start, step.rows(start, stop).repeat(taps, 1, 1), number)
        for start, stop in overlap(ranges, step.start, step.start + len(step.values))
    ]


def end_of(life: Life, reason: str) -> CaptureEnd:
    return CaptureEnd("r", "", list(range(200, 200 + life.counted)), 0, reason, [])


def unanswered(instance: str, result: CaptureResult) -> None:
    """Nobody waits."""


@given(st.data(), lives().filter(lambda life: life.settled))
def test_missing_rows_are_reported(data: st.DataObject, life: Life) -> None:
    want = data.draw(wanted(life.num_prompt_tokens, max(life.stop, 1)))
    hole = data.draw(st.integers(0, max(life.stop - 1, 0)))
    kept = tuple(
        Step(start, step.values[start - step.start : stop - step.start])
        for step in life.steps
        for start, stop in overlap(
            ((0, hole), (hole + 1, 1000)), step.start, step.start + len(step.values)
        )
    )
    lossy = replace(life, steps=kept)
    plan = plan_for(want, life.num_prompt_tokens)
    consumers = run(plan, lossy, "length", frozenset("abc"))
    for instance, taps in want.items():
        for tap, ranges in taps.items():
            sidecar = consumers.finalizes[instance, tap].sidecar
            selected = positions(ranges, life.stop)
            lost = [p for p in selected if p == hole or p >= life.computed]
            assert ("capture_error" in sidecar) == bool(lost)


def test_positions_that_the_request_did_not_reach_are_noted() -> None:
    plan = plan_for({"a": {(0, "post_block"): ((0, 1), (6, 8))}}, 2)
    steps = (Step(0, (0.0, 1.0)), Step(2, (2.0,)))
    consumers = run(plan, Life(2, steps, 2, 3), "stop", frozenset())
    sidecar = consumers.finalizes["a", (0, "post_block")].sidecar
    assert sidecar["positions"] == [0]
    assert "did not reach the positions [6, 7]" in sidecar["capture_note"]


@pytest.mark.parametrize(
    ("reason", "remark"),
    [("stop", ("capture_error", "only 2 of 4")), ("abort", ("capture_note", "2 of 4"))],
)
def test_missing_results_of_readouts_are_reported_as_rows_are(
    reason: str, remark: tuple[str, str]
) -> None:
    tap = (3, "post_block")
    norm = Readout("size", "norm", (tap,), ((0, 2), (4, OPEN_END)))
    readers = (ReadoutReader("a", ("size",)),)
    plan = msgspec.structs.replace(
        plan_for({}, 4), readouts=ReadoutPlan((norm,), (), readers)
    )
    assert plan.lanes == ("a",)
    values = np.array([1.5, 2.5], np.float32)
    rows = ReadoutRows(
        name="size",
        kind="norm",
        array="norm",
        tap=tap,
        positions=[0, 1],
        dtype="float32",
        shape=(),
        data=values.tobytes(),
    )
    sent = CaptureEnd("r", "", [7, 8, 9], 0, reason, ["a"], [rows])
    # As it arrives in the engine's process, where its types are not known.
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    received = msgspec.convert(decoded, CaptureEnd)
    request = CapturedRequest("r", plan, (), [1, 2, 3, 4], {}, {}, frozenset())
    chunks, endings = request.finish(received, unanswered)
    (chunk,), (finalize,) = chunks_in(chunks["a"]), endings["a"].finalizes
    assert chunk.key == finalize.key == ("r", 3, "post_block.size.norm")
    assert chunk.tensor.tolist() == [[1.5], [2.5]]
    sidecar = finalize.sidecar
    assert (sidecar["positions"], sidecar["token_ids"]) == ([0, 1], [1, 2])
    assert (sidecar["dtype"], sidecar["hidden_size"]) == ("float32", 1)
    assert remark[1] in sidecar[remark[0]]
    assert sidecar.keys() & {"capture_error", "capture_note"} == {remark[0]}


def test_a_request_of_which_nothing_was_computed_is_answered() -> None:
    answers: dict[str, CaptureResult] = {}
    end = CaptureEnd("r", "", [], 0, "abort", ["a", "b"])
    never_started(end, answers.__setitem__)
    assert sorted(answers) == ["a", "b"]
    assert all(result.status == "error" for result in answers.values())


def test_chunks_say_where_and_when_their_rows_were_computed() -> None:
    plan = plan_for({"a": {(1, "pre_attn"): ((0, 3),)}}, 3)
    groups = local_groups(plan, {(1, "pre_attn"): 0})
    request = CapturedRequest("r", plan, groups, [1, 2, 3], {}, {}, frozenset())
    assert request.add(0, rows_of_step(0, torch.zeros(1, 2, WIDTH), 5)) == {}
    added = request.add(0, rows_of_step(2, torch.zeros(1, 1, WIDTH), 6))
    (chunk,) = chunks_in(added["a"])
    assert chunk.key == ("r", 1, "pre_attn")
    assert (chunk.row_offset, chunk.step_index) == (0, 5)
    assert chunk.metadata["positions"] == [0, 1]
    assert chunk.tensor.shape == (2, WIDTH)
    assert chunk.dtype == torch.float32


@pytest.mark.parametrize("early", [False, True])
def test_a_prompt_of_several_steps_is_one_view_unless_its_reader_takes_rows_early(
    early: bool,
) -> None:
    """Parts that arrive apart would all be copied where they are joined."""
    tap = (1, "pre_attn")
    plan = plan_for({"a": {tap: ((2, OPEN_END),)}}, 8)
    steps = [Step(at, tuple(float(at + i) for i in range(2))) for at in range(0, 8, 2)]
    life = Life(8, (*steps, Step(8, (8.0,))), 2, 9)
    names = frozenset("a" if early else "")
    consumers = run(plan, life, "length", names, paged=True)
    sizes = [len(chunk.tensor) for chunk in consumers.chunks["a", tap]]
    assert sizes == ([2, 2, 2, 1] if early else [6, 1])
    rows = [(position, float(position)) for position in range(2, 9)]
    assert consumers.rows("a", tap) == rows
    assert consumers.finalizes["a", tap].sidecar["token_ids"] == [*range(102, 108), 200]
    if not early:
        (prompt, _) = (chunk.tensor for chunk in consumers.chunks["a", tap])
        assert prompt.untyped_storage().nbytes() == 6 * WIDTH * 4


def test_what_waits_for_the_rest_of_a_prompt_is_delivered_at_an_abort() -> None:
    plan = plan_for({"a": {(1, "pre_attn"): ((0, 8),)}}, 8)
    life = Life(8, (Step(0, (0.0, 1.0)), Step(2, (2.0, 3.0))), 0, 4)
    consumers = run(plan, life, "abort", frozenset(), paged=True)
    sidecar = consumers.finalizes["a", (1, "pre_attn")].sidecar
    assert sidecar["positions"] == [0, 1, 2, 3]
    assert len(consumers.chunks["a", (1, "pre_attn")]) == 1
