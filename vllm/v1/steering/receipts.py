# SPDX-License-Identifier: Apache-2.0
"""The sum of what steering has done to the tokens of a request, for its client.

Workers measure the doses of each token, the engine core drops those of tokens that do
not count, and the front end sums them up here.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.v1.residual.choices import by_choice
from vllm.v1.residual.receipts import Doses, Effect, ReceiptPart, StepReceipt

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.request import Request


WHEN = "when"
"""The `op` of an effect that is the decision of a condition."""
FIRES_ABOVE = 0.5
"""The gate above which a condition has fired: that of a value at the threshold."""

LARGEST = np.finfo(np.float32).max


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


_PARTS, _NEXT = "receipt_parts", "receipt_next"


def note_receipt(
    request: "Request",
    found: StepReceipt,
    num_tokens: int,
    new_token_ids: Sequence[int],
) -> None:
    """Keep a step's doses until the request's next output.

    Args:
        request: before the new tokens are appended to it.
        found: the step's doses.
        num_tokens: the request's tokens in the step, without draft tokens.
        new_token_ids: the tokens that the step sampled; empty while the prompt is still
            being computed.

    """
    state = vars(request)
    shift, stop = 0, max(part.stop for part in found.parts)
    if new_token_ids:
        # With draft tokens a step is prepared before it is known how many drafts of the
        # previous one were rejected; the request has the accepted ones.
        shift = request.num_tokens - num_tokens - found.start
        stop = request.num_tokens + len(new_token_ids) - 1
    least = state.get(_NEXT, 0)
    for part in found.parts:
        part.start += shift
        kept = part.between(least, stop)
        if kept is not None:
            state.setdefault(_PARTS, []).append(kept)
    state[_NEXT] = max(least, stop)


def take_receipt(request: "Request") -> list[ReceiptPart] | None:
    """Remove and return the doses that no output has carried yet."""
    return vars(request).pop(_PARTS, None) or None


def response_receipts(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The `steering` field of a response to one or several prompts.

    With several choices, receipts are keyed by the choice's index as a string.
    """
    found: dict[str, Any] | None = by_choice(outputs, lambda sample: sample.steering)
    return found


def stamp(chunk: Any, part: "CompletionOutput") -> None:
    """Set the `steering` field of a choice's last streamed chunk."""
    if part.steering is not None:
        chunk.steering = part.steering
