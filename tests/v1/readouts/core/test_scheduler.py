# SPDX-License-Identifier: Apache-2.0
"""Valid results, and results that end a request, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from vllm.v1.readouts.core.scheduler import ReadoutScheduling, take_parts
from vllm.v1.residual.readout_plan import (
    MAX_PACKED,
    Readout,
    ReadoutPart,
    ReadoutPlan,
    StepReadouts,
    StopWhen,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

PROMPT = 10


def request(*stops: StopWhen, positions: Any = ((0, 1 << 40),)) -> Any:
    readout = Readout("p", "probe", ((0, "post_block"),), positions)
    plan = SimpleNamespace(readouts=ReadoutPlan((readout,), stops))
    return SimpleNamespace(
        request_id="r",
        sampling_params=SimpleNamespace(_capture_plan=plan, min_tokens=0),
        num_tokens=PROMPT,
        num_prompt_tokens=PROMPT,
    )


def values(start: int, *numbers: float) -> StepReadouts:
    array = np.array(numbers, dtype=np.float32)[:, None]
    part = ReadoutPart("p", start, len(numbers), {"values": array})
    return StepReadouts({"r": start}, 0, {"r": [part]})


def opened(one: Any) -> ReadoutScheduling:
    scheduling = ReadoutScheduling()
    scheduling.add_request(one)
    return scheduling


def taken(one: Any) -> list[tuple[int, list[float]]]:
    parts = take_parts(one) or []
    for part in parts:
        part.unpack()
    return [(part.start, part.arrays["values"][:, 0].tolist()) for part in parts]


def test_parts_wait_for_an_output_that_carries_them() -> None:
    one = request()
    scheduling = opened(one)
    assert scheduling.take(one, values(0, 1, 2, 3, 4), 4, []).token_ids == []
    found = scheduling.take(one, values(4, 5, 6, 7, 8, 9, 10), 6, [77])
    assert (found.token_ids, found.fired) == ([77], "")
    assert taken(one) == [(0, [1, 2, 3, 4]), (4, [5, 6, 7, 8, 9, 10])]
    assert taken(one) == []


@given(
    arrays(
        st.sampled_from([np.float32, np.int32, np.float16]),
        array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40),
    )
)
def test_arrays_are_the_same_between_processes(array: np.ndarray[Any, Any]) -> None:
    part = ReadoutPart("p", 0, 1, {"a": array.copy(), "large": np.zeros(MAX_PACKED)})
    part.pack()
    assert ("a" in part.arrays) == (array.nbytes > MAX_PACKED)
    assert "large" in part.arrays
    sent = MsgpackEncoder().encode(part)
    received: ReadoutPart = MsgpackDecoder(ReadoutPart).decode(sent)
    received.unpack()
    assert received.arrays["a"].dtype == array.dtype and not received.data
    np.testing.assert_array_equal(received.arrays["a"], array)
    np.testing.assert_array_equal(received.arrays["large"], part.arrays["large"])


def test_rows_of_rejected_drafts_do_not_count() -> None:
    one = request()
    scheduling = opened(one)
    # The prompt and two tokens; one token is fed, with three drafts.
    one.num_tokens = 12
    scheduling.take(one, values(11, 1, 2, 3, 4), 1, [5, 6])
    assert taken(one) == [(11, [1, 2])]


def test_positions_are_those_that_were_accepted_before() -> None:
    one = request()
    scheduling = opened(one)
    one.num_tokens = 12
    # The step assumed that two drafts of the previous step are accepted; none was.
    scheduling.take(one, values(13, 1, 2), 1, [5, 6])
    assert taken(one) == [(11, [1, 2])]


@pytest.mark.parametrize(
    ("numbers", "left", "shown"),
    [
        ((9, 0, 0), [], 1),
        ((0, 9, 9), [5], 2),
        ((0, 0, 9), [5, 6], 3),
        ((0, 0, 0), [5, 6, 7], 3),
    ],
)
def test_a_request_ends_behind_the_first_token_that_fires(
    numbers: tuple[float, ...], left: list[int], shown: int
) -> None:
    one = request(StopWhen("p", above=5.0))
    scheduling = opened(one)
    one.num_tokens = 12
    found = scheduling.take(one, values(11, *numbers), 1, [5, 6, 7])
    assert found.token_ids == left
    assert found.fired == ("readout:p" if 9 in numbers else "")
    assert taken(one)[0][1] == list(numbers)[:shown]


def test_prompt_tokens_and_missing_numbers_end_nothing() -> None:
    one = request(StopWhen("p", above=5.0, below=-5.0))
    scheduling = opened(one)
    assert scheduling.take(one, values(9, 9), 10, [5]).fired == ""
    one.num_tokens = 11
    assert scheduling.take(one, values(10, float("nan")), 1, [5]).fired == ""


def test_only_the_wanted_positions_are_kept() -> None:
    one = request(positions=((2, 4), (6, 7)))
    scheduling = opened(one)
    scheduling.take(one, values(0, *range(10)), 10, [5])
    assert taken(one) == [(2, [2, 3]), (6, [6])]


@pytest.mark.parametrize(("least", "kept"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_rule_ends_no_request_before_its_min_tokens(least: int, kept: int) -> None:
    one = request(StopWhen("p", above=0.0))
    one.sampling_params.min_tokens = least
    one.num_tokens = PROMPT + 1  # One token was generated; three are computed now.
    drafted = opened(one).take(one, values(PROMPT, 1, 1, 1), 1, [5, 6, 7])
    fires = least < 4
    assert drafted.fired == ("readout:p" if fires else "")
    # The token after the one that fires is dropped.
    assert len(drafted.token_ids) == (kept - 1 if fires else 3)
