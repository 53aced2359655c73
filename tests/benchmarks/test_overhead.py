# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the overhead benchmark, and its comparison of outputs."""

import copy
from typing import Any

import pytest

from benchmarks.harness.equality import check_processes, first_difference
from benchmarks.harness.reports import summary
from benchmarks.overhead import _round

OUTPUT = {
    "tokens": [1, 2],
    "logprobs": [[[1, -0.5, 1]], [[2, -0.25, 1]]],
    "prompt_logprobs": [None, [[7, -3.0, 4]]],
}


class Side:
    """Answers for a process."""

    def __init__(self, has_capture: bool, version: str) -> None:
        self._identity = {
            "has_capture": has_capture,
            "distributions": {"vllm": version},
        }

    def do(self, what: str) -> dict[str, Any]:
        assert what == "identity"
        return self._identity


FORK = Side(True, "0.32.0+clearbox.1.cpu")
UPSTREAM = Side(False, "0.32.0")


def test_equal_outputs_have_no_difference() -> None:
    assert first_difference([OUTPUT], [copy.deepcopy(OUTPUT)]) is None


@pytest.mark.parametrize("field", ["tokens", "logprobs", "prompt_logprobs"])
def test_the_smallest_difference_is_found(field: str) -> None:
    other = copy.deepcopy(OUTPUT)
    if field == "tokens":
        other["tokens"][1] = 3
    else:
        other[field][1][0][1] *= 1 + 2**-52
    difference = first_difference([OUTPUT, OUTPUT], [OUTPUT, other])
    assert difference is not None and difference.startswith(f"request 1, {field}")


def test_a_missing_request_is_a_difference() -> None:
    assert first_difference([OUTPUT, OUTPUT], [OUTPUT]) is not None


def test_a_fork_on_upstreams_side_is_noticed() -> None:
    check_processes(UPSTREAM, FORK)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="leaked"):
        check_processes(FORK, FORK)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="leaked"):
        check_processes(Side(False, "0.32.0+clearbox.1"), FORK)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="does not hold the fork"):
        check_processes(UPSTREAM, UPSTREAM)  # type: ignore[arg-type]


def test_the_ratio_is_above_one_where_the_fork_is_faster() -> None:
    slow, fast = {"wall": 2.0, "cpu": 4.0}, {"wall": 1.0, "cpu": 1.0}
    found = _round([slow, slow], [fast, fast], tokens=10)
    assert found.ratio == 2 and found.cpu_ratio == 4 and found.control == 1
    assert found.upstream == (5, 5) and found.fork == (10, 10)


def test_the_interval_is_the_range_of_few_values_and_narrower_for_many() -> None:
    assert summary([3.0, 1.0, 2.0])["interval"] == [1.0, 3.0]
    assert summary([float(n) for n in range(24)])["interval"] == [6.0, 17.0]
