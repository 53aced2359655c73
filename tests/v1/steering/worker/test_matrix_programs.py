# SPDX-License-Identifier: Apache-2.0
"""The matrix row of each token of a step."""

from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.steering.worker.test_phase import (
    CPU,
    OTHER,
    TAP,
    WIDTH,
    Requests,
    begun,
    phase_of,
    tiers,
    view,
    worker,
)
from vllm.model_executor.layers.residual.program import words_of
from vllm.model_executor.layers.residual.program_host import execute_programs
from vllm.v1.steering.plan import Operation, operation
from vllm.v1.steering.spec.matrix import row_positions
from vllm.v1.steering.worker.bank import Bank
from vllm.v1.steering.worker.matrix_programs import Stretch, Template


def matrix(positions: Any, seed: int = 0, tap: Any = TAP) -> list[Operation]:
    """A replacement by rows that contain their index, plus 100 per seed."""
    made = []
    for spans, order in row_positions(positions, len(positions), "positions"):
        rows = np.repeat(order[:, None] + 100 * seed, WIDTH, axis=1)
        bounds = None, None
        rows = rows.astype(np.float32)
        one = operation(
            tap, "replace", rows, 1.0, bounds, False, spans, num_rows=len(rows)
        )
        made.append(one)
    return made


def after(steering: Any, requests: Requests) -> list[float]:
    """The first value of each token's row after a step; it was -1 before."""
    steering.plan_step(view(requests))
    steering.begin_step()
    stream = torch.full((sum(n for _, n, _ in requests), WIDTH), -1.0)
    gates = torch.zeros(len(stream), 4)
    index, rows = steering.tables.programs.at(TAP), steering.program_rows
    execute_programs(stream, stream, None, index, rows, gates)
    steering.end_step()
    return stream[:, 0].tolist()


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    positions=st.lists(st.integers(-4, 12), min_size=1, max_size=9, unique=True),
)
def test_each_token_gets_the_row_of_its_position(
    requests: Requests, positions: list[int]
) -> None:
    steering = worker()
    begun(steering, requests, tiers(base=matrix(positions)))
    expected = []
    for computed, n, size in requests:
        of = {p if p >= 0 else size + p: row for row, p in enumerate(positions)}
        # Positions from the start come after those from the end.
        of |= {p: row for row, p in enumerate(positions) if p >= 0}
        expected += [of.get(p, -1.0) for p in range(computed, computed + n)]
    assert after(steering, requests) == expected


@given(position=st.integers(3, 6), token=st.integers(0, 5))
def test_a_kernel_reads_the_addresses_of_a_stretch(position: int, token: int) -> None:
    """Filled templates equal the words of a program with that offset."""
    operations = [*matrix([3, 4, 5, 6]), *matrix([6, 5, 4, 3], 1, OTHER)]
    phase = phase_of(operations)
    active = frozenset({0, 1})
    words = Template(phase, active).written(Stretch(phase, active, 9, position, token))
    programs = []
    for tap in (TAP, OTHER):
        ((_, made),) = phase.numbered(tap, active)
        programs.append(words_of((replace(made, offset=position - 3 - token),)))
    expected = np.concatenate(programs)
    # The write address differs only where the written rows differ.
    for each in (words, expected):
        each.view(np.int64).reshape(-1, 16)[:, 5] = 0
    assert words.tolist() == expected.tolist()


def test_tensors_that_a_program_joins_stay_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the rows of several features of one SAE, which are copied together."""
    phase = phase_of(matrix([0, 1]))
    ((number, made),) = phase.numbered(TAP, frozenset({0}))
    joined = [replace(made, read=made.read.clone())]
    alive = ref(joined[0].read)
    monkeypatch.setattr(phase, "numbered", lambda *_: [(number, joined.pop())])
    template = Template(phase, frozenset({0}))
    assert template.words.size and alive() is not None


def test_phases_and_configurations_share_what_is_on_the_device() -> None:
    bank = Bank(lambda tap: WIDTH, CPU, 16, {}.__getitem__)
    (one,) = matrix([0, 1])
    first, second = bank.fetch([one]), bank.fetch([one])
    assert first[0] is second[0]
    assert bank.fetch(matrix([0, 1], 1))[0] is not first[0]
