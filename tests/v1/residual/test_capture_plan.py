# SPDX-License-Identifier: Apache-2.0
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import plan_for, positions, wanted
from vllm.v1.residual.capture_plan import READOUTS, CapturePlan, group_taps
from vllm.v1.residual.spans import OPEN_END, merged, overlap, spans_of

END = 24
sets = st.sets(st.integers(0, END - 1))


@given(sets, st.integers(0, END), st.integers(0, END))
def test_an_overlap_is_the_part_within(part: set[int], a: int, b: int) -> None:
    start, stop = sorted((a, b))
    found = overlap(spans_of(part), start, stop)
    covered = [p for first, last in found for p in range(first, last)]
    assert covered == sorted(p for p in part if start <= p < stop)


def test_an_open_range_goes_on() -> None:
    assert overlap(((3, OPEN_END),), 1000, 1002) == [(1000, 1002)]


@given(wanted(num_prompt_tokens=6, end=END))
def test_groups_read_each_tap_once_for_exactly_its_readers(want: dict) -> None:
    groups = group_taps(want)
    grouped = [tap for group in groups for tap in group.taps]
    assert len(grouped) == len(set(grouped))
    again: dict = {name: {} for name in want}
    for group in groups:
        for reader in group.readers:
            again[reader.instance] |= dict.fromkeys(group.taps, reader.ranges)
        assert group.ranges == merged(
            span for reader in group.readers for span in reader.ranges
        )
    assert again == want


@given(wanted(num_prompt_tokens=6, end=END), st.integers(0, END), st.integers(0, 8))
def test_rows_are_counted_as_one_per_selected_tap_and_position(
    want: dict, start: int, length: int
) -> None:
    plan = plan_for(want, 6)
    pairs = {
        (tap, position)
        for taps in want.values()
        for tap, ranges in taps.items()
        for position in positions(ranges, start + length)
        if position >= start
    }
    assert plan.rows_in(start, start + length) == len(pairs)


@given(wanted(num_prompt_tokens=6, end=END))
def test_the_prefix_cache_may_serve_up_to_the_first_captured_prompt_row(
    want: dict,
) -> None:
    plan = plan_for(want, 6)
    selected = [
        position
        for taps in want.values()
        for ranges in taps.values()
        for position in positions(ranges, 6)
    ]
    assert plan.first_prompt_row == min(selected, default=None)


@given(wanted(num_prompt_tokens=6, end=END))
def test_a_plan_survives_the_way_to_the_workers(want: dict) -> None:
    plan = plan_for(want, 6)
    sent = msgspec.msgpack.encode(plan)
    assert msgspec.msgpack.decode(sent, type=CapturePlan) == plan
    assert plan.instances == tuple(sorted(want))


def test_taps_of_readouts_are_in_the_group_of_those_that_are_delivered() -> None:
    taps = [(layer, "post_block") for layer in range(4)]
    every = dict.fromkeys(taps, ((0, OPEN_END),))
    read = {taps[3]: ((2, 5),)}
    (group,) = group_taps({"files": every, READOUTS: read})
    assert [one.instance for one in group.readers] == ["files"]
    assert group.taps == tuple(taps) and group.ranges == ((0, OPEN_END),)
    # What nobody else reads is still staged.
    some = dict.fromkeys(taps, ((0, 4),))
    first, second = group_taps({"files": some, READOUTS: read})
    assert (first.taps, second.taps) == (tuple(taps[:3]), (taps[3],))
    assert second.ranges == ((0, 5),)
    assert {one.instance for one in second.readers} == {"files", READOUTS}
