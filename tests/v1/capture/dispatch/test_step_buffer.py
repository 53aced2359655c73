# SPDX-License-Identifier: Apache-2.0
"""Requests start and end between consecutive steps: the place of each row."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.dispatch.step_buffer import StagedStep, StepBuffer, StepChain
from vllm.v1.capture.staging.ring import Segment
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView

TAPS = 2
MEMORY = torch.arange(5000).float()[:, None]
"""Memory whose rows contain their index."""
STAGING: Any = SimpleNamespace(host_rows=MEMORY)
NAMES = "abcde"
GROUPS = (
    LocalGroup(((0, "post_block"),), (0,), ((0, OPEN_END),), ()),
    LocalGroup(((1, "post_block"),), (1,), ((2, OPEN_END),), ()),
)


class Steps:
    """Consecutive steps."""

    def __init__(self, batches: int = 1) -> None:
        self._placement = StepLayout(range(TAPS), 1000, None, batches)
        self._known: set[str] = set()
        self._end = self._number = 0

    def step(self, positions: dict[str, int]) -> StagedStep:
        names = list(positions)
        for name in names:
            if name not in self._known:
                self._placement.add(name, GROUPS)
                self._known.add(name)
        starts, ones = np.array(list(positions.values())), np.ones(len(names), int)
        placed = self._placement.place(StepView(names, starts, ones, len(names)))
        assert placed is not None
        segment = Segment(self._end, placed.layout.num_rows)
        self._end += segment.num_rows
        self._number += 1
        return StagedStep(self._number, placed, segment)


def test_batches_that_alternate_have_a_piece_for_each_request() -> None:
    steps, buffer = Steps(batches=2), StepBuffer(STAGING, NAMES)
    for number in range(10):
        buffer.add([steps.step({"a": 5 + number, "b": 30 + number, "c": 20 + number})])
        buffer.add([steps.step({"d": 7 + number, "e": 90 + number})])
    for name, by_group in buffer.take_all().items():
        for (piece,) in by_group.values():
            assert piece.num_rows == piece.num_steps == 10, name
            assert piece.step_before == piece.step - 2


def test_requests_that_come_and_go_leave_the_others_in_one_piece() -> None:
    steps = Steps()
    chain = StepChain(steps.step({"a": 9, "b": 30}), MEMORY)
    gone = "b"
    for number, name in enumerate("cde"):
        alone = steps.step({"a": 10 + 2 * number})
        assert chain.follows(alone)
        assert [found[0] for found in chain.add(alone)] == [gone, gone]
        joined = steps.step({"a": 11 + 2 * number, name: 5})
        assert chain.follows(joined)
        assert chain.add(joined) == []
        gone = name
    pieces = [piece for _, group, piece in chain.take("a") if group == 0]
    assert [(piece.start, piece.num_rows) for piece in pieces] == [(9, 7)]


def test_a_step_that_is_elsewhere_or_later_does_not_follow() -> None:
    steps = Steps()
    first = steps.step({"a": 5})
    chain = StepChain(first, MEMORY)
    second, third = steps.step({"a": 6}), steps.step({"a": 7})
    assert not chain.follows(third)
    assert chain.follows(second)
    assert not chain.follows(second._replace(segment=first.segment)), "no stride"
    assert not chain.follows(second._replace(places={}))
    true_starts: Any = object()
    assert not chain.follows(second._replace(true_starts=true_starts))
    chain.add(second)
    elsewhere = Segment(third.segment.start + 1, third.segment.num_rows)
    assert chain.follows(third)
    assert not chain.follows(third._replace(segment=elsewhere)), "another stride"
    assert not chain.follows(steps.step({"a": 8, "b": 3})), "another shape"
