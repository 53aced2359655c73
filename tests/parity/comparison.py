# SPDX-License-Identifier: Apache-2.0
"""Compares captured rows and steered logits with the library's.

The negative controls check that the comparison detects slightly wrong rows and
interventions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from tests.parity.bounds import Bounds, Expected, generated
from tests.parity.distance import at_point, relative
from tests.parity.engine import Answer, Answers
from tests.parity.inside import INSIDE
from tests.parity.recipe import ADDED, ORDER, STREAMS
from tests.support.hf_reference import Reference, Stream, Tap

NO_TENSOR = "the library has no tensor of it"
ROUNDED = "in bfloat16 models choose all experts: a choice may depend on rounding"


@dataclass(slots=True)
class Compared:
    """The outcome of a case."""

    tolerance: float = 0.0
    """The largest allowed error of a row, at any hook point."""
    row_error: float = 0.0
    """The largest error of a row, relative to the row's norm."""
    change_error: float = 0.0
    """The largest error of steered logits, relative to their change by steering."""
    logit_error: float = 0.0
    """The largest error of unsteered logits: upstream's own agreement."""
    wrong_rows: list[str] = field(default_factory=list)
    """Taps that are missing, or whose rows exceed the tolerance."""
    wrong_changes: list[str] = field(default_factory=list)
    """Interventions whose effect on the logits differs from the library's."""
    unnoticed: list[str] = field(default_factory=list)
    """Negative controls that the comparison does not detect."""
    differing: Mapping[str, str] = field(default_factory=dict)
    """Points inside the block that the library computes otherwise, and how."""
    unproven: dict[str, str] = field(default_factory=dict)
    """Points inside the block that the library does not prove, with the reasons."""

    @property
    def problems(self) -> list[str]:
        """All problems of the case."""
        return self.wrong_rows + self.wrong_changes + self.unnoticed


def compare(
    answers: Answers,
    reference: Reference,
    bounds: Bounds,
    differing: Mapping[str, str] = MappingProxyType({}),
) -> Compared:
    """Compare all requests of a case with the library's model in float32.

    Args:
        answers: the requests.
        reference: the library's model.
        bounds: the largest allowed errors.
        differing: points inside the block that the library computes otherwise, with the
            reasons.
    """
    compared = Compared(tolerance=bounds.largest, differing=differing)
    expected_taps = {(i, h) for i, hooks in answers.hook_points.items() for h in hooks}
    elsewhere = {tap for tap in expected_taps if tap[1] in (*ADDED, *INSIDE)}
    unknown = expected_taps - reference.points.keys() - elsewhere
    if unknown:
        compared.wrong_rows.append(f"the reference has no {sorted(unknown)}")
        return compared
    layers = {layer for layer, _ in reference.points}
    missing = {(i, h) for i in layers for h in reference.order} - expected_taps
    if missing:
        compared.wrong_rows.append(f"no taps at {sorted(missing)}")
    for answer in answers.requests:
        if answer.rows.keys() != expected_taps:
            compared.wrong_rows.append(f"{answer.steered}: rows of other taps came")
        elif answer.steered is None:
            _plain(answer, reference, bounds, compared)
            if answers.dtype is torch.float32 and reference.sums:
                _check_added(answer, compared)
        else:
            _steered(answer, answer.steered, reference, bounds, compared)
    offered = {hook for _, hook in expected_taps}
    for hook in (compared.differing.keys() & offered) - compared.unproven.keys():
        compared.wrong_rows.append(f"{hook} does not differ from the library's")
    return compared


def _check_added(answer: Answer, compared: Compared) -> None:
    """What the branches add makes each point of the stream of the one before."""
    rows = answer.rows
    layers = sorted({layer for layer, _ in rows})
    sums = [([(0, "embed")], (0, "pre_attn"))]
    for layer in layers:
        pre, post, block = ((layer, hook) for hook in ORDER)
        sums.append(([pre, (layer, "attn_add")], post))
        sums.append(([post, (layer, "mlp_add")], block))
    added = [(layer, hook) for layer in layers for hook in ADDED[1:]]
    sums.append(([(0, "embed"), *added], (layers[-1], "post_block")))
    for summands, whole in sums:
        if rows.keys() >= {*summands, whole}:
            total = torch.stack([rows[tap] for tap in summands]).sum(0)
            error = relative(total, rows[whole])
            if not error <= compared.tolerance:
                wrong = f"{summands} sum to {whole} with an error of {error:.2g}"
                compared.wrong_rows.append(wrong)


def _check_rows(
    answer: Answer, expected: Stream, bounds: Bounds, compared: Compared
) -> None:
    who = f"steered at {answer.steered}" if answer.steered else "plain"
    for tap, rows in answer.rows.items():
        if tap[1] in ADDED:
            continue
        if tap[1] in INSIDE and tap not in expected:
            compared.unproven[tap[1]] = NO_TENSOR
            continue
        if tap[1] == "expert_ids" and not bounds.exact:
            compared.unproven[tap[1]] = ROUNDED
            continue
        error = at_point(tap[1], rows, expected[tap])
        if error > bounds.rows[tap] and tap[1] in compared.differing:
            compared.unproven[tap[1]] = compared.differing[tap[1]]
            continue
        compared.row_error = max(compared.row_error, error)
        if not error <= (bound := bounds.rows[tap]):
            wrong = f"{who}, rows of {tap}: {error:.1e}, at most {bound:.1e}"
            compared.wrong_rows.append(wrong)


def _plain(
    answer: Answer, reference: Reference, bounds: Bounds, compared: Compared
) -> None:
    expected = Expected(reference, answer)
    _check_rows(answer, expected.rows, bounds, compared)
    error = relative(answer.logits, expected.logits)
    compared.logit_error = max(compared.logit_error, error)
    taps = {tap for tap in answer.rows if tap[1] not in compared.unproven}
    for what, passes in neighbours(expected.rows, taps, bounds.rows):
        if passes:
            compared.unnoticed.append(what)


def _steered(
    answer: Answer, tap: Tap, reference: Reference, bounds: Bounds, compared: Compared
) -> None:
    expected = Expected(reference, answer)
    assert expected.added is not None
    _check_rows(answer, expected.rows, bounds, compared)
    error = expected.change_error(answer.logits)
    compared.change_error = max(compared.change_error, error)
    if not error <= bounds.changes:
        wrong = f"logits steered at {tap}: {error:.1e}, at most {bounds.changes:.1e}"
        compared.wrong_changes.append(wrong)
    for other, size in _elsewhere(tap, bounds, reference):
        with reference.adding(other, expected.added * size):
            _, logits = reference.run(answer.fed, answer.num_prompt_tokens)
        if expected.change_error(generated(logits, answer)) <= bounds.changes:
            compared.unnoticed.append(f"steered at {other} by {size}, not at {tap}")


def _elsewhere(
    tap: Tap, bounds: Bounds, reference: Reference
) -> Iterator[tuple[Tap, float]]:
    """Negative controls of interventions at neighbouring places."""
    layer, hook = tap
    yield tap, 1.1 if bounds.exact else -1.0
    order = reference.order
    if hook not in order:
        return
    for ahead in order[order.index(hook) + 1 :][:1]:
        if not reference.are_one(tap, (layer, ahead)):
            yield (layer, ahead), 1.0


def neighbours(
    stream: Stream, taps: set[Tap], bounds: Mapping[Tap, float]
) -> Iterator[tuple[str, bool]]:
    """Negative controls of rows, and whether the comparison detects them."""
    for (layer, hook), rows in stream.items():
        if (layer, hook) not in taps:
            continue
        bound = bounds[layer, hook]

        def passes(
            other: torch.Tensor,
            rows: torch.Tensor = rows,
            bound: float = bound,
            hook: str = hook,
        ) -> bool:
            return at_point(hook, other, rows) <= bound

        here = f"layer {layer} {hook}"
        if hook != "expert_weights":  # Some routers weigh all chosen experts alike.
            yield f"{here}, one position off", passes(rows.roll(1, dims=0))
        yield f"{here}, too large by a tenth", passes(rows * 1.1)
        # In consecutive layers without MLP and attention two taps may be equal.
        next_layer = stream.get((layer + 1, hook), rows)
        if next_layer.shape == rows.shape and not torch.equal(next_layer, rows):
            yield f"{here}, one layer off", passes(next_layer)
        order = STREAMS if hook in STREAMS else ORDER
        if order is STREAMS:
            passed = passes(rows.roll(rows.shape[-1] // 2, dims=-1))
            yield f"{here}, streams in another order", passed
        if hook not in order[1:]:
            continue
        # pre_attn -> post_attn -> post_block: the addition of one branch.
        before = order[order.index(hook) - 1]
        branch = rows - stream[layer, before]
        yield f"{here}, the branch alone", passes(branch)
        if not branch.any():
            continue  # a layer without this branch
        yield f"{here}, the branch twice", passes(rows + branch)
        yield f"{here}, without the branch", passes(rows - branch)
        yield f"{here}, a stale residual on top", passes(rows + stream[layer, before])
