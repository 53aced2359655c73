# SPDX-License-Identifier: Apache-2.0
"""How far the captured rows and the steered logits are from the library's.

The negative controls ask the same comparison whether it would notice rows or
interventions that are a little wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tests.parity.engine import Answer, Answers, vector
from tests.parity.recipe import ORDER
from tests.parity.reference import Reference, Stream, Tap

CHANGE = {1e-4: 2e-3, 2e-2: 1e-1}
"""By the tolerance of rows, the largest error of steered logits, relative to what
steering changed."""


@dataclass(slots=True)
class Compared:
    """What came of a case."""

    row_error: float = 0.0
    """The largest error of a row, relative to the row's norm."""
    change_error: float = 0.0
    """The largest error of steered logits, relative to their change by steering."""
    logit_error: float = 0.0
    """The largest error of logits that are not steered: upstream's own agreement."""
    wrong_rows: list[str] = field(default_factory=list)
    """Taps that are missing, and rows whose error is over the tolerance."""
    wrong_changes: list[str] = field(default_factory=list)
    """Interventions whose effect on the logits is not the library's."""
    unnoticed: list[str] = field(default_factory=list)
    """Negative controls that the comparison lets pass."""

    @property
    def problems(self) -> list[str]:
        """All that must not be."""
        return self.wrong_rows + self.wrong_changes + self.unnoticed


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to that row's norm in `expected`."""
    if found.shape != expected.shape:
        return float("inf")
    error = (found.float() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    # Where nothing is expected, anything found is wrong.
    parts = torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, 0.0))
    return float(parts.max()) if parts.isfinite().all() else float("inf")


def compare(answers: Answers, reference: Reference, tolerance: float) -> Compared:
    """Hold all requests of a case to the library's model."""
    compared = Compared()
    expected_taps = {(i, h) for i, hooks in answers.hook_points.items() for h in hooks}
    unknown = expected_taps - reference.points.keys()
    if unknown:
        compared.wrong_rows.append(f"the reference has no {sorted(unknown)}")
        return compared
    layers = {layer for layer, _ in reference.points}
    missing = {(i, h) for i in layers for h in ORDER} - expected_taps
    if missing:
        compared.wrong_rows.append(f"no taps at {sorted(missing)}")
    for answer in answers.requests:
        if answer.rows.keys() != expected_taps:
            compared.wrong_rows.append(f"{answer.steered}: rows of other taps came")
        elif answer.steered is None:
            _plain(answer, reference, tolerance, compared)
        else:
            _steered(answer, answer.steered, reference, tolerance, compared)
    return compared


def _run(reference: Reference, answer: Answer) -> tuple[Stream, torch.Tensor]:
    return reference.run(answer.fed, answer.num_prompt_tokens)


def _generated(logits: torch.Tensor, answer: Answer) -> torch.Tensor:
    return logits[answer.num_prompt_tokens - 1 :]


def _check_rows(
    answer: Answer, expected: Stream, tolerance: float, compared: Compared
) -> None:
    who = f"steered at {answer.steered}" if answer.steered else "plain"
    for tap, rows in answer.rows.items():
        error = relative(rows, expected[tap])
        compared.row_error = max(compared.row_error, error)
        if not error <= tolerance:
            compared.wrong_rows.append(f"{who}, rows of {tap}: {error:.1e}")


def _plain(
    answer: Answer, reference: Reference, tolerance: float, compared: Compared
) -> None:
    expected, logits = _run(reference, answer)
    _check_rows(answer, expected, tolerance, compared)
    error = relative(answer.logits, _generated(logits, answer))
    compared.logit_error = max(compared.logit_error, error)
    for what, passes in neighbours(expected, set(answer.rows), tolerance):
        if passes:
            compared.unnoticed.append(what)


def _steered(
    answer: Answer, tap: Tap, reference: Reference, tolerance: float, compared: Compared
) -> None:
    rows, logits = _run(reference, answer)
    before = _generated(logits, answer)
    added = vector(tap, answer.rows[tap].shape[-1])
    with reference.adding(tap, added):
        expected, logits = _run(reference, answer)
    # A capture sees a point before what is added there.
    expected[tap] = rows[tap]
    for other in reference.shared_with(tap):
        expected[other] = rows[other] + added
    _check_rows(answer, expected, tolerance, compared)
    after = _generated(logits, answer)
    changes = CHANGE[tolerance]
    error = relative(answer.logits - before, after - before)
    compared.change_error = max(compared.change_error, error)
    if not error <= changes:
        compared.wrong_changes.append(f"logits steered at {tap}: {error:.1e}")
    for other, size in _elsewhere(tap, tolerance, reference):
        with reference.adding(other, added * size):
            wrong = _generated(_run(reference, answer)[1], answer)
        if relative(wrong - before, after - before) <= changes:
            compared.unnoticed.append(f"steered at {other} by {size}, not at {tap}")


def _elsewhere(
    tap: Tap, tolerance: float, reference: Reference
) -> Iterator[tuple[Tap, float]]:
    """Interventions that are a little wrong."""
    layer, hook = tap
    yield tap, 1.1 if tolerance == 1e-4 else -1.0
    if hook not in ORDER:
        return
    for ahead in ORDER[ORDER.index(hook) + 1 :][:1]:
        if not reference.are_one(tap, (layer, ahead)):
            yield (layer, ahead), 1.0


def neighbours(
    stream: Stream, taps: set[Tap], tolerance: float
) -> Iterator[tuple[str, bool]]:
    """Rows that are a little wrong, and whether the comparison lets them pass."""
    for (layer, hook), rows in stream.items():
        if (layer, hook) not in taps:
            continue

        def passes(other: torch.Tensor, rows: torch.Tensor = rows) -> bool:
            return relative(other, rows) <= tolerance

        here = f"layer {layer} {hook}"
        yield f"{here}, one position off", passes(rows.roll(1, dims=0))
        yield f"{here}, too large by a tenth", passes(rows * 1.1)
        # In a row of layers without MLP and without attention two taps may be one.
        next_layer = stream.get((layer + 1, hook))
        if next_layer is not None and not torch.equal(next_layer, rows):
            yield f"{here}, one layer off", passes(next_layer)
        if hook not in ORDER[1:]:
            continue
        # pre_attn -> post_attn -> post_block: what one branch added.
        before = ORDER[ORDER.index(hook) - 1]
        branch = rows - stream[layer, before]
        yield f"{here}, the branch alone", passes(branch)
        if not branch.any():
            continue  # a layer without this branch
        yield f"{here}, the branch twice", passes(rows + branch)
        yield f"{here}, without the branch", passes(rows - branch)
        yield f"{here}, a stale residual on top", passes(rows + stream[layer, before])
