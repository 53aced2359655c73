# SPDX-License-Identifier: Apache-2.0
"""Results of steps in which each readout has one token.

While requests decode, a step has dozens of small results. They stay in the step's
arrays until a request's are sent, so that those of several steps are sent together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from vllm.v1.residual.readout_plan import ReadoutPart, RequestReadouts

Arrays: TypeAlias = dict[str, np.ndarray]

MOST_STACKED_BYTES = 1 << 16
"""Largest results of several steps that are stacked once for all requests."""


class TokenResult(NamedTuple):
    """Where a readout's result is in the arrays of a step."""

    name: str
    """Of the readout."""
    job: int
    """Index of the arrays."""
    rows: slice
    """Its rows."""
    has_taps: bool
    """Whether the rows are an axis of the result; otherwise there is one row."""
    start: int
    """Token position at shift 0."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Where the results of all requests are, for consecutive steps."""

    number: tuple[int, int]
    """Steps of equal numbers have equal tables."""
    results: dict[str, tuple[TokenResult, ...]]
    """By request id."""


@dataclass(slots=True)
class TokenStep:
    """The results of a step in which each readout has one token."""

    table: TokenTable
    shift: int
    """Added to the positions in the table."""
    arrays: list[Arrays]
    """By job and name: `[rows, ...]`."""
    _stacked: tuple[int, list[Arrays]] | None = None
    """The arrays of this and following steps, and the number of the steps."""

    def start_of(self, req_id: str) -> int | None:
        """Position of the request's token; None if it has no results."""
        found = self.table.results.get(req_id)
        return None if found is None else found[0].start + self.shift

    def get(self, req_id: str) -> RequestReadouts | None:
        """The results of a request; None if it has none."""
        results = self.table.results.get(req_id)
        if results is None:
            return None
        parts = []
        for name, job, rows, has_taps, start in results:
            at = (None, rows) if has_taps else rows
            arrays = {label: one[at] for label, one in self.arrays[job].items()}
            parts.append(ReadoutPart(name, start + self.shift, 1, arrays))
        return RequestReadouts(results[0].start + self.shift, parts)


StepReadouts: TypeAlias = dict[str, RequestReadouts] | TokenStep
"""The results of a step; `get` returns those of a request."""


def parts_of(req_id: str, steps: Sequence[TokenStep]) -> Iterator[ReadoutPart]:
    """The results of a request in consecutive steps, in order of their positions."""
    first = 0
    for last in range(1, len(steps) + 1):
        if last < len(steps) and _follows(steps[last - 1], steps[last]):
            continue
        for result in steps[first].table.results[req_id]:
            yield _part(result, steps[first:last])
        first = last


def _follows(one: TokenStep, other: TokenStep) -> bool:
    same = one.table.number == other.table.number
    return same and one.shift + 1 == other.shift


def _part(result: TokenResult, steps: Sequence[TokenStep]) -> ReadoutPart:
    first = steps[0]
    size = sum(one.nbytes for arrays in first.arrays for one in arrays.values())
    if size * len(steps) > MOST_STACKED_BYTES:
        arrays = _stack([step.arrays[result.job] for step in steps], result.rows)
    else:
        whole = _stacked(steps)[result.job]
        arrays = {name: one[:, result.rows] for name, one in whole.items()}
    if not result.has_taps:
        arrays = {name: one[:, 0] for name, one in arrays.items()}
    return ReadoutPart(result.name, result.start + first.shift, len(steps), arrays)


def _stacked(steps: Sequence[TokenStep]) -> list[Arrays]:
    """By job and name: `[steps, rows, ...]`; the same for all requests."""
    first = steps[0]
    if first._stacked is None or first._stacked[0] != len(steps):
        everything = [
            _stack([step.arrays[number] for step in steps], slice(None))
            for number in range(len(first.arrays))
        ]
        first._stacked = len(steps), everything
    return first._stacked[1]


def _stack(steps: Sequence[Arrays], rows: slice) -> Arrays:
    return {name: np.stack([one[name][rows] for one in steps]) for name in steps[0]}
