# SPDX-License-Identifier: Apache-2.0
"""Bounds of the deviation of rows and logits from the library's in float32.

A float32 case has fixed bounds: rounding takes a hundredth of them. In bfloat16 the
loss depends on the processor's instructions and on the kernels chosen for them, so it
is measured where the test runs: the library's model in bfloat16 is compared with the
library's in float32, for the same requests and the same steering.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tests.parity.distance import at_point, relative
from tests.parity.engine import Answer, Answers, vector
from tests.parity.inside import INSIDE
from tests.support.hf_reference import Reference, Stream, Tap

ROWS, CHANGES = 1e-4, 2e-3
"""Bounds in float32: of a row, and of steered logits relative to their change by
steering."""
ROUND_OFF = 2.0**-8
"""Relative rounding error of bfloat16."""
FACTOR = 2.0
"""Upstream rounds as often as the library, at other places. With the instruction sets
that were tried, its deviation from float32 is at most 1.1 times the library's at any
hook point."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest errors of a case."""

    rows: Mapping[Tap, float]
    """Bound of a row by hook point, relative to the row's norm."""
    changes: float = CHANGES
    """Bound of steered logits, relative to their change by steering."""
    exact: bool = True
    """Whether errors are those of float32."""

    @property
    def largest(self) -> float:
        """The largest bound of all hook points."""
        return max(self.rows.values(), default=0.0)


class Expected:
    """The library's results for a request, and their change by steering."""

    def __init__(self, reference: Reference, answer: Answer) -> None:
        self.rows, logits = reference.run(answer.fed, answer.num_prompt_tokens)
        self.logits = self.before = generated(logits, answer)
        self.added: torch.Tensor | None = None
        if (tap := answer.steered) is not None:
            self.added = vector(tap, answer.rows[tap].shape[-1])
            self._steer(reference, answer, tap, self.added)

    def _steer(
        self, reference: Reference, answer: Answer, tap: Tap, added: torch.Tensor
    ) -> None:
        plain = self.rows
        with reference.adding(tap, added):
            self.rows, logits = reference.run(answer.fed, answer.num_prompt_tokens)
        self.logits = generated(logits, answer)
        # A capture sees a point before what is added there.
        self.rows[tap] = plain[tap]
        for other in reference.shared_with(tap):
            self.rows[other] = plain[other] + added

    def change_error(self, logits: torch.Tensor) -> float:
        """The error of steered logits, relative to their change by steering."""
        return relative(logits - self.before, self.logits - self.before)


def generated(logits: torch.Tensor, answer: Answer) -> torch.Tensor:
    """The logits from which a request's tokens were sampled."""
    return logits[answer.num_prompt_tokens - 1 :]


def in_float32(reference: Reference) -> Bounds:
    """The bounds of a float32 case."""
    layers = {layer for layer, _ in reference.points}
    inside = {(layer, hook) for layer in layers for hook in INSIDE}
    return Bounds(dict.fromkeys([*reference.points, *inside], ROWS))


def in_bfloat16(answers: Answers, exact: Reference, rounded: Reference) -> Bounds:
    """The library's own loss in bfloat16 on this machine, times `FACTOR`.

    Args:
        answers: the requests.
        exact: the library's model in float32.
        rounded: the same checkpoint in bfloat16.
    """
    rows, changes = dict.fromkeys(exact.points, ROUND_OFF), ROUND_OFF
    for answer in answers.requests:
        expected, found = Expected(exact, answer), Expected(rounded, answer)
        changes = max(changes, _change(expected, found))
        for tap, error in _errors(found.rows, expected.rows).items():
            rows[tap] = max(rows.get(tap, ROUND_OFF), error)
    bounds = {tap: FACTOR * error for tap, error in rows.items()}
    return Bounds(bounds, FACTOR * changes, exact=False)


def _errors(found: Stream, expected: Stream) -> dict[Tap, float]:
    return {tap: at_point(tap[1], rows, expected[tap]) for tap, rows in found.items()}


def _change(expected: Expected, found: Expected) -> float:
    return 0.0 if expected.added is None else expected.change_error(found.logits)
