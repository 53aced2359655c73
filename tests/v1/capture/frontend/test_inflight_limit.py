# SPDX-License-Identifier: Apache-2.0
import gc
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.capabilities import capabilities_of
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.inflight_limit import KEEPING, RESULTS, InflightLimit
from vllm.v1.capture.frontend.request_tracker import HeldBytes, RequestTracker
from vllm.v1.residual.capture_plan import LIVE, CapturePlan, Reader, TapGroup
from vllm.v1.residual.readout_plan import KeepWhen, Readout, ReadoutPlan, StopWhen
from vllm.v1.residual.spans import OPEN_END

CONSUMERS = capabilities_of(
    {"inline": SimpleNamespace(max_inflight_bytes=1000), "files": SimpleNamespace()}
)


def plan(*instances: str, samples: int = 1) -> CapturePlan:
    readers = tuple(Reader(name, ((2, OPEN_END),)) for name in instances)
    taps = ((0, "pre_attn"), (1, "pre_attn"))
    groups = (TapGroup(taps, ((2, OPEN_END),), readers),)
    return CapturePlan("r", 5, groups, "nowhere", samples)


def limit() -> tuple[InflightLimit, RequestTracker]:
    requests = RequestTracker(None, 1, None)  # type: ignore[arg-type]
    return InflightLimit(CONSUMERS, 8, requests), requests


def test_only_rows_that_come_back_count() -> None:
    room, _ = limit()
    assert room.limits == {"inline": 1000}
    # Positions 2 to 5+4-2, at two hook points.
    assert room.bytes_of(plan("inline", "files"), 4) == {"inline": 6 * 2 * 8}
    assert room.bytes_of(plan("inline", samples=3), 4) == {"inline": 3 * 6 * 2 * 8}
    assert room.bytes_of(plan("files"), 4) == {}
    # Those that outputs carry before the last, too.
    assert room.bytes_of(plan("inline", LIVE), 4) == {"inline": 2 * 6 * 2 * 8}


def test_what_is_reserved_counts_until_the_request_is_in_flight() -> None:
    room, requests = limit()
    first, second = plan("inline"), plan("inline")
    size = 6 * 2 * 8
    for one in (first, second):
        room.reserve(one, 4)
    assert requests.held.of("inline", "reserved") == 2 * size
    for _ in range(2):
        assert room.take(first, 4) == {"inline": size}
        assert requests.held.of("inline", "reserved") == size
    # A request that fails in between reserves nothing.
    del second, one
    gc.collect()
    assert requests.held.of("inline", "reserved") == 0


def test_results_of_readouts_count_where_they_have_a_limit() -> None:
    readout = Readout("n", "norm", ((0, "pre_attn"),), ((0, OPEN_END),))
    reads = msgspec.structs.replace(
        plan("inline", LIVE), readouts=ReadoutPlan((readout,), result_bytes=70)
    )
    room, _ = limit()
    assert RESULTS not in room.bytes_of(reads, 4), "offline they are the caller's"
    room.limits[RESULTS] = 100
    assert room.bytes_of(reads, 4) == {"inline": 2 * 6 * 2 * 8, RESULTS: 70}
    room.reserve(reads, 4)
    with pytest.raises(CaptureValidationError, match="unread responses") as refused:
        room.reserve(msgspec.structs.replace(reads), 4)
    assert refused.value.parameter == "readouts"


def test_rows_that_wait_for_a_decision_count_where_they_have_a_limit() -> None:
    readout = Readout("n", "norm", ((0, "pre_attn"),), ((0, OPEN_END),))
    keep = KeepWhen("files", StopWhen("n", above=1.0))
    keeps = msgspec.structs.replace(
        plan("inline", "files"), readouts=ReadoutPlan((readout,), keep_when=(keep,))
    )
    room, _ = limit()
    size = 6 * 2 * 8
    assert room.bytes_of(keeps, 4) == {"inline": size}, "offline it is the caller's"
    room.limits[KEEPING] = 2 * size
    assert room.bytes_of(keeps, 4) == {"inline": size, KEEPING: size}
    inflight = [msgspec.structs.replace(keeps) for _ in range(2)]
    for one in inflight:
        room.reserve(one, 4)
    with pytest.raises(CaptureValidationError, match="--capture-host-memory-bytes"):
        room.reserve(msgspec.structs.replace(keeps), 4)
    inflight.pop(0)
    gc.collect()
    room.reserve(keeps, 4)


NAMES = ("inline", "other")
STATES = ("reserved", "running", "aborted", "unsent")
sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100))
steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.sampled_from(STATES), sizes),
        st.tuples(st.integers(0, 3), st.none(), st.none()),
    ),
    max_size=30,
)


@given(steps)
def test_the_sums_are_those_over_all_requests(steps: list[tuple]) -> None:
    held, known = HeldBytes(), {}
    for number, state, given_sizes in steps:
        if state is None:
            held.drop(number)
            known.pop(number, None)
        else:
            held.put(number, state, given_sizes)
            known[number] = state, given_sizes
        for name in NAMES:
            expected = {
                one: sum(size.get(name, 0) for at, size in known.values() if at == one)
                for one in STATES
            }
            assert {one: held.of(name, one) for one in STATES} == expected
            assert held.of(name, *STATES) == sum(expected.values())
