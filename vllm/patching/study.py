# SPDX-License-Identifier: Apache-2.0
"""A sweep as data: requests to send, and the numbers made of their replies.

Every driver works in the same way: for each round of `rounds` it sets `replies`, then
it sends `asks` and passes each reply to `take`. Nothing here knows an engine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm.patching.alignment import Alignment
from vllm.patching.grid import READ_BY_OTHERS, Cell, Grid
from vllm.patching.questions import MOST_TOKENS, Ask, Question, Reply, Steering
from vllm.patching.result import PatchResult, Skipped, position_of
from vllm.v1.steering.errors import fail

CHECKS = 3
"""Cells at which a run gets its own rows, to measure the noise floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sweep does, checked."""

    grid: Grid
    question: Question
    recovers: bool
    """Whether values are shares of the way from the corrupt run to the clean one."""
    target: tuple[int, ...]
    """The tokens of the prompt that is patched."""
    source: tuple[int, ...] | None
    """The tokens of the run from which rows come; None if they are not known."""
    patch: Callable[[Cell], Mapping[str, Any]]
    """The entry of `steering_vectors` that patches a cell's positions."""
    last_layer: int
    capture: Mapping[str, Any] | None = None
    """What is kept of the source's run, or of an ablated prompt's."""
    noise: Callable[[], Steering] | None = None
    """What disturbs the target in every cell, known once the rows are kept."""
    num_same: int = 0
    """Number of first tokens at which source and target have equal rows."""
    effect: str = "denoise"
    """`"denoise"` if the source is the clean run, `"noise"` if the target is, and
    `"ablate"` if there is no other run."""
    most_logprobs: int = 20
    tokens: Sequence[str] = ()
    """The texts of the target's tokens."""
    known_source: float = math.nan
    """The source's value, if it was measured before."""
    alignment: Alignment
    """Of source and target."""
    run: str | None = None
    """The name of the run from which rows come, if there is one."""


class Done(NamedTuple):
    """A cell whose value is known."""

    cell: Cell
    value: float
    error: str | None = None


@dataclass(slots=True)
class _Measurement:
    """The requests of one number, and their replies."""

    cell: Cell | None
    """None for those of the noise floor."""
    expected: float
    replies: list[Reply | None]


@dataclass(slots=True)
class Study:
    """A sweep over a grid: one prompt, changed at one place after another."""

    plan: Plan
    question: Question = field(init=False)
    replies: list[Reply] = field(default_factory=list)
    """The replies to the requests of the last round, in their order."""
    asks: list[Ask] = field(default_factory=list)
    """The requests of the grid, once the rounds before it are answered."""
    filled: list[Done] = field(default_factory=list)
    """The cells that need no request."""
    result: PatchResult = field(init=False)
    _source_value: float = math.nan
    _target_value: float = math.nan
    _owners: list[tuple[_Measurement, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.question = plan.question
        grid = plan.grid
        self.result = PatchResult(
            values={
                hook: np.full(grid.shape, np.nan, dtype=np.float32)
                for hook in grid.hooks
            },
            layers=grid.layers,
            heads=grid.heads,
            positions=tuple(column.targets for column in grid.columns),
            tokens=tuple(plan.tokens),
            metric="recovered" if plan.recovers else plan.question.metric,
        )

    def rounds(self) -> Iterator[list[Ask]]:
        """The requests before the grid; `replies` is set before the next round.

        Raises:
            SteeringValidationError: both runs give the same number, of which none is
                recovered.

        """
        plan = self.plan
        other = plan.target if plan.source is None else plan.source
        asks: list[Ask] = []
        if self.question.metric == "kl":
            clean = other if plan.effect == "denoise" else plan.target
            asks.append(Ask(clean, top=min(plan.most_logprobs, MOST_TOKENS)))
        if plan.capture is not None:
            asks.append(Ask(other, capture=plan.capture))
        if asks:
            yield asks
        if self.question.metric == "kl":
            self.question = self.question.towards(self.replies[0])
        noise = None if plan.noise is None else plan.noise()
        asks = self.question.asks(plan.target, noise)
        count, self._source_value = len(asks), plan.known_source
        measures = plan.source is not None and math.isnan(plan.known_source)
        if measures:
            asks += self.question.asks(other, None)
        yield asks
        self._target_value = self.question.value(self.replies[:count])
        if measures:
            self._source_value = self.question.value(self.replies[count:])
        self._set_baselines()
        self._ask(noise)

    def _set_baselines(self) -> None:
        clean, corrupt = self._source_value, self._target_value
        if self.plan.effect != "denoise":
            clean, corrupt = corrupt, clean
        if self.plan.recovers and not abs(clean - corrupt) > 0:
            raise fail(
                f"metric: the clean and the corrupt run both have {clean:.6g}, so "
                "nothing is there to recover; choose another answer, or other prompts",
                "metric",
                "recovered",
            )
        self.result.clean, self.result.corrupt = clean, corrupt

    def _ask(self, noise: Steering | None) -> None:
        """Plan the requests of cells, and of the noise floor beside them."""
        plan, run = self.plan, []
        for cell in plan.grid.cells():
            reason = self._reason(cell)
            if reason is not None:
                self._skip(cell, reason)
            elif self._changes_nothing(cell):
                self.filled.append(self._done(cell, self._target_value))
            else:
                run.append(cell)
                steering = _joined(noise, cell, plan.patch(cell))
                self._measure(plan.target, steering, cell, math.nan)
        self._measure(plan.target, noise, None, self._target_value)
        for cell in run[:: max(len(run) // CHECKS, 1)][:CHECKS]:
            entry = dict(plan.patch(cell))
            if plan.source is None:
                steering = _joined(noise, cell, {**entry, "alpha": 0.0})
                self._measure(plan.target, steering, None, self._target_value)
            else:
                entry["positions"] = list(cell.column.sources)
                steering = _joined(None, cell, entry)
                self._measure(plan.source, steering, None, self._source_value)

    def _measure(
        self,
        prompt: Sequence[int],
        steering: Steering | None,
        cell: Cell | None,
        expected: float,
    ) -> None:
        asks = self.question.asks(prompt, steering)
        measurement = _Measurement(cell, expected, [None] * len(asks))
        self._owners += [(measurement, number) for number in range(len(asks))]
        self.asks += asks

    def _reason(self, cell: Cell) -> str | None:
        if cell.layer not in self.plan.grid.having[cell.hook]:
            return f"layer {cell.layer} has no {cell.hook}"
        return cell.column.reason

    def _changes_nothing(self, cell: Cell) -> bool:
        """Whether the rows are equal, or reach no token that is measured."""
        targets, sources = cell.column.targets, cell.column.sources
        plan = self.plan
        if targets == sources and targets[-1] < plan.num_same:
            return True
        is_last = cell.layer == plan.last_layer and cell.hook not in READ_BY_OTHERS
        return is_last and targets[-1] < len(plan.target) - 1

    def _skip(self, cell: Cell, reason: str) -> None:
        position = position_of(cell.column.targets)
        self.result.skipped.append(
            Skipped(cell.hook, cell.layer, cell.head, position, reason)
        )

    def take(self, number: int, reply: Reply | Exception) -> Iterator[Done]:
        """Take the reply to a request of `asks`; yields the cell that it completes.

        An exception is the reason why the cell has no value.
        """
        measurement, place = self._owners[number]
        cell = measurement.cell
        if isinstance(reply, Exception):
            if cell is not None and place == 0:
                self._skip(cell, str(reply))
                yield Done(cell, math.nan, str(reply))
            return
        measurement.replies[place] = reply
        replies = [one for one in measurement.replies if one is not None]
        if len(replies) < len(measurement.replies):
            return
        value = self.question.value(replies)
        if cell is not None:
            yield self._done(cell, value)
            return
        error = abs(self._scaled(value) - self._scaled(measurement.expected))
        self.result.noise_floor = float(np.fmax(self.result.noise_floor, error))

    def _done(self, cell: Cell, value: float) -> Done:
        scaled = self._scaled(value)
        self.result.values[cell.hook][cell.place] = scaled
        return Done(cell, scaled)

    def _scaled(self, value: float) -> float:
        if not self.plan.recovers:
            return value
        clean, corrupt = self.result.clean, self.result.corrupt
        return (value - corrupt) / (clean - corrupt)


def _joined(
    noise: Steering | None, cell: Cell, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The steering of a cell: what disturbs the prompt, then the patch."""
    steering = {hook: dict(layers) for hook, layers in (noise or {}).items()}
    layers = steering.setdefault(cell.hook, {})
    layers[cell.layer] = [*layers.get(cell.layer, ()), entry]
    return steering
