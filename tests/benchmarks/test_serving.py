# SPDX-License-Identifier: Apache-2.0
"""A turn of the fork's is compared with upstream's turns right before and behind it."""

from collections.abc import Sequence

from benchmarks.serving import NOISE, Figures, cases, compare


def turns(values: Sequence[float]) -> list[Figures]:
    return [{"mean_tpot_ms": value} for value in values]


def test_a_machine_that_gets_slower_is_in_both_sides() -> None:
    names = list("abcd")
    fork = dict(zip(names, turns([11, 13, 15, 17])))
    found = compare(fork, turns([10, 12, 14, 16, 18]))
    for name in names:
        assert found[name]["fork"] == found[name]["upstream"] == fork[name]
    assert found[NOISE] == dict(zip(("upstream", "fork"), turns([14, 14])))


def test_two_of_upstreams_turns_say_nothing_of_the_noise() -> None:
    assert compare({"a": {"x": 3.0}}, [{"x": 1.0}, {"x": 3.0}]) == {
        "a": {"upstream": {"x": 2.0}, "fork": {"x": 3.0}}
    }


def test_steered_requests_have_sixteen_configurations() -> None:
    steered = [case for name, case in cases(4).items() if name.startswith("steered")]
    assert [len({str(body) for body in one.bodies}) for one in steered] == [16] * 3
