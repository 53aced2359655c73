# SPDX-License-Identifier: Apache-2.0
"""The bounds of bfloat16 follow the library's own loss on the test machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.parity import bounds
from tests.parity.comparison import compare
from tests.parity.distance import at_point
from tests.parity.engine import Answer, Answers
from tests.parity.recipe import ORDER
from tests.parity.reference import Stream, Tap

PROMPT, FED, WIDTH, WORDS = 3, [3, 4, 5, 6], 8, 5
generator = torch.Generator().manual_seed(0)
READ = torch.randn(WIDTH, WORDS, generator=generator)


class Linear:
    """A stand-in for the library's model: one layer, with a random stream per seed."""

    order = ORDER

    def __init__(self, error: float = 0.0, chosen: int = 0) -> None:
        self.points = {(0, hook): None for hook in ORDER}
        self._error = error
        self._chosen = chosen
        self._added: dict[Tap, torch.Tensor] = {}

    def run(self, fed: list[int], prompt: int) -> tuple[Stream, torch.Tensor]:
        rows: Stream = {}
        stream = torch.zeros(len(fed), WIDTH)
        for number, hook in enumerate(ORDER):
            step = torch.Generator().manual_seed(number)
            # Each branch rotates the stream, so that places can be distinguished.
            turn = torch.randn(WIDTH, WIDTH, generator=step) / WIDTH**0.5
            added = torch.randn(len(fed), WIDTH, generator=step)
            stream = stream + stream @ turn + added
            stream = stream * (1 + self._error)
            rows[0, hook] = stream
            stream = stream + self._added.get((0, hook), torch.zeros(WIDTH))
        if self._chosen:
            rows[0, "expert_ids"] = torch.full((len(fed), 2), float(self._chosen))
        return rows, stream @ READ

    @contextmanager
    def adding(self, tap: Tap, vector: torch.Tensor) -> Iterator[None]:
        self._added = {tap: vector}
        yield
        self._added = {}

    def are_one(self, tap: Tap, other: Tap) -> bool:
        return False

    def shared_with(self, tap: Tap) -> list[Tap]:
        return []


def answers(model: Any) -> Answers:
    """The answers of an engine that computes like `model`."""
    asked = [Answer(None, FED, PROMPT, {}, torch.zeros(0))]
    empty = {(0, hook): torch.zeros(0, WIDTH) for hook in ORDER}
    asked += [Answer(tap, FED, PROMPT, empty, torch.zeros(0)) for tap in empty]
    found = []
    for answer in asked:
        got = bounds.Expected(model, answer)
        found.append(Answer(answer.steered, FED, PROMPT, got.rows, got.logits))
    return Answers({0: ORDER}, torch.bfloat16, found)


def problems(error: float, cost: float) -> tuple[list[str], list[str]]:
    """Wrong rows, and undetected controls, if the library loses `cost`."""
    exact: Any = Linear()
    found = answers(Linear(error))
    allowed = bounds.in_bfloat16(found, exact, Linear(cost))  # type: ignore[arg-type]
    compared = compare(found, exact, allowed)
    return compared.wrong_rows + compared.wrong_changes, compared.unnoticed


def test_a_machine_that_loses_more_is_allowed_more() -> None:
    assert problems(error=0.009, cost=0.008) == ([], [])
    wrong, _ = problems(error=0.009, cost=0.002)
    assert wrong


def test_wrong_rows_are_detected_within_the_rounding_of_bfloat16() -> None:
    assert problems(error=0.0, cost=0.008) == ([], [])


def test_float32_has_fixed_bounds() -> None:
    exact: Any = Linear()
    allowed = bounds.in_float32(exact)
    assert compare(answers(Linear(1e-6)), exact, allowed).problems == []
    assert compare(answers(Linear(1e-3)), exact, allowed).wrong_rows


def test_a_small_logit_of_a_router_is_judged_beside_the_others() -> None:
    logits = torch.tensor([[3.0, 4.0], [0.0, 0.1]])
    found = logits + 0.01
    assert at_point("router_logits", found, logits) < 0.01
    assert at_point("mlp_in", found, logits) > 0.1
    assert at_point("router_logits", logits * 1.1, logits) > 0.05


def test_chosen_experts_are_not_compared_in_bfloat16() -> None:
    tap = (0, "expert_ids")
    exact: Any = Linear(chosen=1)
    found = answers(Linear(chosen=2))
    known = Answers({0: (*ORDER, tap[1])}, found.dtype, found.requests)
    rounded: Any = Linear(0.008, chosen=1)
    compared = compare(known, exact, bounds.in_bfloat16(known, exact, rounded))
    assert compared.unproven.keys() == {tap[1]} and not compared.problems
    allowed = bounds.in_float32(exact)
    assert any("expert_ids" in one for one in compare(known, exact, allowed).wrong_rows)
