# SPDX-License-Identifier: Apache-2.0
"""The sides of a decode step are measured beside each other."""

from typing import ClassVar

import pytest

from benchmarks.decode_step import SETTLE, compare


class Replayed:
    """An engine on a GPU whose clock slows down equally for both sides."""

    asked: ClassVar[list[str]]

    def __init__(self, name: str, times: float) -> None:
        self.name, self.times = name, times

    def record(self) -> None:
        self.asked.append(f"{self.name}'s graphs")

    def milliseconds(self, case: str, batch: int) -> float:
        self.asked.append(f"{self.name}'s {case}")
        return self.times * (batch + len(self.asked))


def test_a_decode_steps_ratios_are_to_upstreams_beside_it() -> None:
    Replayed.asked = []
    upstream, fork = Replayed("upstream", 1.0), Replayed("fork", 1.5)
    found = compare(upstream, fork, ["one layer captured"], [1000], rounds=5)
    recorded = ["upstream's graphs", "fork's graphs"]
    theirs, ours = "upstream's plain", "fork's one layer captured"
    settled = [theirs] * SETTLE + ["fork's plain"] * SETTLE
    round_ = 2 + 2 * SETTLE + 7
    assert Replayed.asked[: 2 * round_] == [
        *(*recorded, *settled, *[theirs, ours] * 3, theirs),
        *(*recorded, *settled, *[ours, theirs] * 3, ours),
    ]
    ratio = found["ratio"]["one layer captured"][1000]
    low, high = found["range"]["one layer captured"][1000]
    assert [low, ratio, high] == pytest.approx([1.5] * 3, rel=1e-9)
    Replayed.asked = []
    noise = compare(upstream, upstream, ["plain"], [1000], rounds=1)
    assert Replayed.asked == ["upstream's graphs", *[theirs] * (SETTLE + 7)]
    assert noise["ratio"]["plain"][1000] == pytest.approx(1.0, abs=0.002)
