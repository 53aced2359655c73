# SPDX-License-Identifier: Apache-2.0
"""Measures effect and damage of vectors and their controls at several doses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.steering.evaluation.candidates import VECTOR, Candidate, candidates
from vllm.steering.evaluation.engine import log_odds, next_tokens
from vllm.steering.extract import read_rows
from vllm.steering.measures import divergence, repetition, standard_error
from vllm.steering.pairs import Pair, Prompt
from vllm.steering.sweep import Generated, generate, mean, perplexities
from vllm.v1.steering.spec.files import VectorSet

if TYPE_CHECKING:
    from vllm import LLM

Judge = Callable[[Sequence[Generated]], float]

EARLY = 0.5
"""An answer ends early if it stops before this fraction of the plain one's length."""

SURE = 2.0
"""A mean counts as positive if it exceeds this many standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurements of one candidate at one dose."""

    layer: int
    hook: str
    kind: str
    """See `Candidate.kind`."""
    dose: float
    """Norm of the added vector over the mean norm of the held-out texts' rows."""
    auroc: float
    """See `Candidate.auroc`."""
    effect: float
    """Mean change of the log-odds of a held-out pair's positive text, in nats."""
    effect_error: float
    """Standard error of the effect."""
    right_sign: float
    """Fraction of the pairs whose log-odds increased."""
    kl: float
    """Mean KL divergence in nats from the unsteered model, over harmless prompts.

    Of the distribution of the first generated token.
    """
    perplexity: float
    """Perplexity of answers to harmless prompts, under the unsteered model."""
    repetition: float
    """Mean fraction of repeated 3-grams in these answers."""
    early_ends: float
    """Fraction of these answers that end before half of the unsteered answer's length.
    """
    judged: float = math.nan
    """The judge's mean score; NaN without a judge."""
    changes: tuple[float, ...] = ()
    """The change of each pair's log-odds in nats, whose mean is the effect."""

    def as_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict; numbers that are not finite are None."""
        fields = asdict(self)
        return {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in fields.items()
        }


def evaluate(
    llm: "LLM",
    vectors: VectorSet,
    pairs: Sequence[Pair],
    harmless: Sequence[Prompt],
    doses: Sequence[float],
    max_tokens: int = 40,
    seed: int = 0,
    judge: Judge | None = None,
) -> list[Point]:
    """Evaluate every vector and its controls at every dose.

    Args:
        llm: an engine with steering, readouts and `max_logprobs=-1`.
        vectors: the vectors, each of which is evaluated alone.
        pairs: held-out pairs, which the vectors were not computed from.
        harmless: prompts unrelated to the vectors.
        doses: norms of the added vector, relative to the stream's mean norm.
        max_tokens: length limit of an answer to a harmless prompt.
        seed: random seed for the controls.
        judge: scores the answers of a setting.

    Returns:
        A point for each candidate and dose.

    """
    from vllm import SamplingParams

    every = [
        candidate
        for tap in vectors.taps
        for candidate in _candidates(llm, vectors, tap, pairs, seed)
    ]
    chosen = [(candidate, dose) for candidate in every for dose in doses]
    settings = [None, *(_setting(candidate, dose) for candidate, dose in chosen)]
    odds = log_odds(llm, pairs, settings)
    divergences = _divergences(llm, harmless, settings)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    made = generate(llm, harmless, settings, greedy)
    surprise = perplexities(llm, made)
    points = []
    for number, (candidate, dose) in enumerate(chosen, start=1):
        change = odds[number] - odds[0]
        points.append(
            Point(
                layer=candidate.tap[0],
                hook=candidate.tap[1],
                kind=candidate.kind,
                dose=dose,
                auroc=candidate.auroc,
                effect=float(change.mean()),
                effect_error=standard_error(list(change)),
                right_sign=float((change > 0).mean()),
                kl=divergences[number],
                perplexity=surprise[number],
                repetition=mean([repetition(a.token_ids) for a in made[number]]),
                early_ends=_early(made[0], made[number]),
                judged=judge(made[number]) if judge else math.nan,
                changes=tuple(change.tolist()),
            )
        )
    return points


def _candidates(
    llm: "LLM",
    vectors: VectorSet,
    tap: tuple[int, str],
    pairs: Sequence[Pair],
    seed: int,
) -> list[Candidate]:
    layer, hook = tap
    sides = [
        read_rows(llm, [getattr(pair, side) for pair in pairs], hook, [layer])[tap]
        for side in ("positive", "negative")
    ]
    return candidates(tap, vectors.vectors[tap], sides[0], sides[1], seed)


def _setting(candidate: Candidate, dose: float) -> dict[str, Any]:
    layer, hook = candidate.tap
    return {hook: {layer: candidate.vector(dose)}}


def _divergences(
    llm: "LLM", harmless: Sequence[Prompt], settings: Sequence[Any]
) -> list[float]:
    """The mean KL divergence over prompts, by setting; 0 for the first, unsteered."""
    plain = next_tokens(llm, harmless, settings[0]).astype(np.float64)
    found = [0.0]
    for setting in settings[1:]:  # One at a time, to bound the memory of the outputs.
        steered = next_tokens(llm, harmless, setting).astype(np.float64)
        found.append(mean([divergence(p, s) for p, s in zip(plain, steered)]))
    return found


def _early(plain: Sequence[Generated], steered: Sequence[Generated]) -> float:
    return mean(
        [
            float(after.ended and len(after.token_ids) < EARLY * len(before.token_ids))
            for before, after in zip(plain, steered)
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The conclusion about one vector."""

    layer: int
    hook: str
    best_dose: float | None = None
    """The largest dose with a KL below the limit; None if there is none."""
    effect: float = math.nan
    """The effect at this dose, in nats."""
    control_effect: float = math.nan
    """The larger of the controls' effects at this dose, in nats."""
    works: bool = False
    """Whether effect and AUROC are better than chance and than the controls.

    The effect, and its paired difference to each control's, must exceed `SURE` standard
    errors, and the AUROC 0.5.
    """

    def sentence(self, kl_limit: float) -> str:
        """The conclusion as a sentence."""
        place = f"layer {self.layer} {self.hook}"
        if self.best_dose is None:
            return f"{place}: no dose keeps the KL below {kl_limit:g}"
        effects = (
            f"effect {self.effect:+.3g} at dose {self.best_dose:g}, the largest with "
            f"KL below {kl_limit:g}; controls {self.control_effect:+.3g}"
        )
        if self.works:
            return f"{place}: works: {effects}"
        return f"{place}: does nothing that its controls do not: {effects}"


def verdicts(points: Sequence[Point], kl_limit: float) -> list[Verdict]:
    """A verdict for each vector, best first."""
    found = []
    for layer, hook in sorted({(point.layer, point.hook) for point in points}):
        here = [p for p in points if (p.layer, p.hook) == (layer, hook)]
        found.append(_verdict(layer, hook, here, kl_limit))
    return sorted(found, key=lambda one: (not one.works, -one.effect))


def _is_above_zero(changes: Sequence[float]) -> bool:
    """Whether the mean over pairs exceeds `SURE` standard errors."""
    return mean(changes) > SURE * standard_error(changes)


def _verdict(
    layer: int, hook: str, points: Sequence[Point], kl_limit: float
) -> Verdict:
    fitting = [p for p in points if p.kind == VECTOR and p.kl < kl_limit]
    best = max(fitting, key=lambda point: point.dose, default=None)
    if best is None:
        return Verdict(layer=layer, hook=hook)
    controls = [p for p in points if p.kind != VECTOR and p.dose == best.dose]
    sure = _is_above_zero(best.changes) and all(
        _is_above_zero([a - b for a, b in zip(best.changes, control.changes)])
        for control in controls
    )
    return Verdict(
        layer=layer,
        hook=hook,
        best_dose=best.dose,
        effect=best.effect,
        control_effect=max((p.effect for p in controls), default=math.nan),
        works=sure and best.auroc > 0.5,
    )
