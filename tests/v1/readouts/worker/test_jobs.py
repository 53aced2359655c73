# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a readout are staged, against a loop over taps and tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker.jobs import StagedSpan, places_of, rows_at
from vllm.v1.residual.row_blocks import LocalGroup


@given(st.data())
def test_rows_of_taps_in_groups_of_several_widths(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), "sizes")
    groups, staged = [], {}
    start, count = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5))
    for number, size in enumerate(sizes):
        taps = tuple((layer, f"point {number}") for layer in range(size))
        groups.append(LocalGroup(taps, tuple(range(size)), (), ()))
        each, row = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 50))
        before, after = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        stride = each * (before + count + after) + data.draw(st.integers(0, 4))
        span = StagedSpan(start - before, start + count + after, row, stride, each)
        staged[number] = [span]
    every = [tap for one in groups for tap in one.taps]
    taps = data.draw(st.permutations(every))[: data.draw(st.integers(1, len(every)))]
    expected = []
    for position in range(start, start + count):
        rows: list[int] = []
        for layer, point in taps:
            (own,) = staged[int(point.split()[1])]
            first = own.row + layer * own.stride + own.each * (position - own.start)
            rows += range(first, first + own.each)
        expected.append(rows)
    ((at, found),) = rows_at(places_of(taps, groups), ((start, start + count),), staged)
    assert at == start
    np.testing.assert_array_equal(found, expected)


def test_a_group_that_lacks_a_position_gives_no_rows() -> None:
    groups = [LocalGroup(((0, name),), (0,), (), ()) for name in "ab"]
    whole, part = StagedSpan(0, 4, 0, 4, 1), StagedSpan(2, 4, 9, 2, 1)
    places = places_of([(0, "a"), (0, "b")], groups)
    assert not list(rows_at(places, ((0, 4),), {0: [whole], 1: [part]}))
    ((at, rows),) = rows_at(places, ((2, 4),), {0: [whole], 1: [part]})
    assert at == 2 and rows.tolist() == [[2, 9], [3, 10]]
