# SPDX-License-Identifier: Apache-2.0
"""A turn of the fork is compared with upstream's turns directly before and after it."""

from collections.abc import Sequence

import pytest

from benchmarks.serving import (
    ALONE,
    NAMED,
    NOISE,
    OWN,
    Beside,
    Figures,
    cases,
    compare,
    one_load,
    plan_round,
)


def turns(values: Sequence[float]) -> list[Figures]:
    return [{"mean_tpot_ms": value} for value in values]


def test_a_machine_that_gets_slower_is_in_both_sides() -> None:
    names = list("abcd")
    fork = dict(zip(names, turns([11, 13, 15, 17])))
    found = compare(fork, [Beside(one) for one in turns([10, 12, 14, 16, 18])])
    for name in names:
        assert found[name]["fork"] == found[name]["upstream"] == fork[name]
    assert found[NOISE] == dict(zip(("upstream", "fork"), turns([14, 14])))


def test_two_of_upstreams_turns_say_nothing_of_the_noise() -> None:
    beside = [Beside({"x": 1.0}), Beside({"x": 3.0})]
    assert compare({"a": {"x": 3.0}}, beside) == {
        "a": {"upstream": {"x": 2.0}, "fork": {"x": 3.0}}
    }


def test_a_case_is_compared_with_plain_requests_of_both_servers() -> None:
    upstream, own = turns([10, 12]), turns([20, 24])
    found = compare(
        {"a": {"mean_tpot_ms": 33.0}}, list(map(Beside, upstream, own)), "plain"
    )
    means = dict(zip(("upstream", "own"), turns([11, 22])))
    assert found["a"] == {
        "upstream": means["upstream"],
        "fork": {"mean_tpot_ms": 33.0},
        OWN: means["own"],
    }
    assert found["plain"] == {"upstream": means["upstream"], "fork": means["own"]}


def test_steered_requests_have_sixteen_configurations() -> None:
    steered = [case for name, case in cases(4).items() if name.startswith("steered")]
    assert [len({str(body) for body in one.bodies}) for one in steered] == [16] * 3


@pytest.mark.parametrize("forth", [True, False])
def test_every_turn_is_between_plain_requests_to_both_servers(forth: bool) -> None:
    of_load = {n: c for n, c in cases(4).items() if c.load == "decode"}
    taken: list[tuple[str, int]] = []

    def turn(side: str, bodies: Sequence[object] = ()) -> Figures:
        taken.append((side, len(bodies)))
        return {"mean_tpot_ms": float(len(taken))}

    assert one_load(of_load, turn, forth).keys() == {NOISE, *of_load}
    pair = [("upstream", 0), ("fork", 0)][:: 1 if forth else -1]
    asked = [("fork", len(case.bodies)) for case in of_load.values() if case.bodies]
    assert asked[:3] == [("fork", 16), ("fork", 16), ("fork", 32)]
    expected = list(pair)
    for one in asked[:: 1 if forth else -1]:
        expected += [one, *pair]
    assert taken == expected


def test_where_no_plain_turn_is_wanted_the_fork_has_none() -> None:
    alone = cases(4, [NAMED])
    sides: list[str] = []

    def turn(side: str, bodies: Sequence[object] = ()) -> Figures:
        sides.append(side)
        return {"mean_tpot_ms": 1.0}

    assert OWN not in next(iter(one_load(alone, turn, True).values()))
    assert sides == ["upstream", "fork", "upstream"]


def test_a_request_alone_is_compared_with_plain_ones_alone() -> None:
    alone = {n: c for n, c in cases(4).items() if c.load == "alone"}
    found = one_load(alone, lambda side, bodies=(): {"mean_tpot_ms": 1.0}, True)
    assert found.keys() == {ALONE, NAMED}
    assert OWN in found[NAMED]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_each_server_meets_each_of_the_other_sides(servers: int) -> None:
    plans = [plan_round(number, servers) for number in range(2 * servers**2)]
    met = [(pair["upstream"], pair["fork"]) for pair, _ in plans]
    every = {(a, b) for a in range(servers) for b in range(servers)}
    assert set(met[: servers**2]) == every
    usual = sum(forth for _, forth in plans)
    assert usual == len(plans) / 2
