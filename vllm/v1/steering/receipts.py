# SPDX-License-Identifier: Apache-2.0
"""Receipts: what steering has done to the tokens of a request.

Workers measure the doses of each token, the engine core drops those of tokens that do
not count, and the front end sums them up. These records are sent between them. This
module imports neither torch nor the rest of steering, because `vllm.sampling_params`
imports it.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.v1.steering.conditions import Condition

WHEN = "when"
"""The `op` of an effect that is the decision of a condition."""
FIRES_ABOVE = 0.5
"""The gate above which a condition has fired: that of a value at the threshold."""

LARGEST = np.finfo(np.float32).max

Doses: TypeAlias = npt.NDArray[np.float32]


FiredLabel: TypeAlias = tuple[str, int, str]
"""Name of a condition's probe (empty if it has none), its layer and hook point."""
Fired: TypeAlias = list[tuple[str, int, str, int]]
"""Labels, each with a number of tokens at which such a condition has fired."""


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """Something that is measured: an operation, the sum of additions, a condition."""

    layer: int
    """The `(layer, hook)` at which it acts, or at which the probe reads."""
    hook: str
    op: str
    """Name of the operation, or `WHEN`."""
    key: str
    """Equal for what is the same in prompt and generated tokens."""
    probe: str = ""
    """Name of the condition's probe; empty if it has none."""
    scope: str = ""
    """Scope of the condition."""


def effect_of(condition: Condition, column: int) -> Effect:
    """The effect that stands for a condition's decisions.

    Args:
        condition: the condition.
        column: its gate column, equal in both phases of a configuration.

    """
    return Effect(
        condition.layer,
        condition.hook,
        WHEN,
        str(column),
        condition.name,
        condition.scope,
    )


class ReceiptPart(msgspec.Struct, array_like=True):
    """The doses of some consecutive tokens of a request."""

    start: int
    """Position of the first token."""
    effects: tuple[Effect, ...]
    doses: np.ndarray
    """float32 `[tokens, len(effects)]`: the norm of the change over the norm of the
    stream before it, or a condition's gate; NaN where the token's program does not have
    the effect."""

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.doses)

    def between(self, low: int, high: int) -> "ReceiptPart | None":
        """The part at positions `[low, high)`; None if it has none there."""
        first, last = max(low, self.start), min(high, self.stop)
        if first >= last:
            return None
        if (first, last) == (self.start, self.stop):
            return self
        rows = slice(first - self.start, last - self.start)
        return ReceiptPart(first, self.effects, self.doses[rows])


class StepReceipt(msgspec.Struct, array_like=True):
    """A step's doses for a request."""

    start: int
    """Position of the request's first token in the step, as the worker assumed it.

    With draft tokens it may be too large; the engine core corrects it.
    """
    parts: list[ReceiptPart]


class Total:
    """The sum of an effect's doses over tokens."""

    __slots__ = ("count", "first", "largest", "seen", "sum")

    def __init__(self) -> None:
        self.seen = 0
        """Tokens whose program had the effect."""
        self.count = 0
        """Tokens that it changed, or at which the condition fired."""
        self.sum = 0.0
        self.largest = 0.0
        self.first: int | None = None
        """Position of the first of the counted tokens."""

    def add(self, effect: Effect, start: int, doses: Doses) -> None:
        """Add the doses `[tokens]` of tokens from position `start` on."""
        least = FIRES_ABOVE if effect.op == WHEN else 0.0
        acts = np.flatnonzero(doses > least)  # NaN is not larger.
        self.seen += int(np.count_nonzero(~np.isnan(doses)))
        if not len(acts):
            return
        self.count += len(acts)
        finite = np.minimum(doses[acts], LARGEST)  # JSON has no infinity.
        self.sum += float(finite.sum(dtype=np.float64))
        self.largest = max(self.largest, float(finite.max()))
        if self.first is None:
            self.first = start + int(acts[0])


class Receipt:
    """Sums up the doses of one sample, in the front end."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._parts: list[ReceiptPart] = []
        self._decides = num_prompt_tokens - 1
        """The position at which conditions of the scope `prompt` decide."""

    def add(self, parts: Iterable[ReceiptPart]) -> None:
        """Add the parts that came with an output, in ascending order."""
        self._parts.extend(parts)

    def as_dict(self, stop: int) -> dict[str, Any]:
        """The receipt for the tokens below position `stop`, as plain data."""
        totals: dict[Effect, Total] = {}
        for part in self._parts:
            kept = part.between(0, stop)
            for number, effect in enumerate(part.effects):
                total = totals.setdefault(effect, Total())
                own = kept
                if kept is not None and effect.scope == "prompt":
                    own = kept.between(self._decides, self._decides + 1)
                if own is not None:
                    total.add(effect, own.start, own.doses[:, number])
        return {"applied": _applied(totals), "fired": _fired(totals)}


def _applied(totals: dict[Effect, Total]) -> list[dict[str, Any]]:
    return [
        {
            "hook": effect.hook,
            "layer": effect.layer,
            "op": effect.op,
            "tokens": total.count,
            "dose": {
                "mean": total.sum / total.count if total.count else 0.0,
                "max": total.largest,
            },
        }
        for effect, total in sorted(totals.items(), key=lambda pair: pair[0].layer)
        if effect.op != WHEN
    ]


def _fired(totals: dict[Effect, Total]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for effect, total in totals.items():
        if effect.op != WHEN:
            continue
        name = effect.probe or f"{effect.hook}.{effect.layer}"
        number = 2
        unique = name
        while unique in found:
            unique, number = f"{name}#{number}", number + 1
        found[unique] = {
            "layer": effect.layer,
            "hook": effect.hook,
            "scope": effect.scope,
            "decided": total.seen,
            "tokens": total.count,
            "first": total.first,
        }
    return found
