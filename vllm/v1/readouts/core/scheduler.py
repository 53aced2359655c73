# SPDX-License-Identifier: Apache-2.0
"""Which results of a step count, and which end their request: in the scheduler.

A row is that of a token that was fed to the model, and the step that computes it
samples the token after it. So a token is known to end its request when the next one has
been sampled, which is then dropped; with asynchronous scheduling a further step may be
in flight, whose output is dropped like that of any request that has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.v1.readouts.plan import (
    Ranges,
    Readout,
    ReadoutPart,
    ReadoutPlan,
    RequestReadouts,
    StopWhen,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

STOP_PREFIX = "readout:"
"""What `stop_reason` begins with; the readout's name follows."""


@dataclass(frozen=True, slots=True)
class ReadOut:
    """What a step's results mean for its request."""

    token_ids: list[int]
    """The new tokens that are left."""
    fired: str = ""
    """The stop reason, if a readout ends the request behind these tokens."""


@dataclass(slots=True)
class _State:
    plan: ReadoutPlan
    by_name: Mapping[str, Readout]
    next_position: int = 0
    """Results below have come: a request that was preempted computes them again."""


class ReadoutScheduling:
    """The requests of this engine that read out."""

    def __init__(self) -> None:
        """Begin with no request."""
        self._states: dict[str, _State] = {}

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._states

    def add_request(self, request: "Request") -> None:
        """A request has come to this engine."""
        params = request.sampling_params
        plan = params._capture_plan if params is not None else None
        if plan is not None and plan.readouts is not None:
            by_name = {one.name: one for one in plan.readouts.readouts}
            self._states[request.request_id] = _State(plan.readouts, by_name)

    def forget(self, request: "Request") -> None:
        """A request has ended."""
        self._states.pop(request.request_id, None)

    def take(
        self,
        request: "Request",
        found: RequestReadouts | None,
        num_tokens: int,
        new_token_ids: Sequence[int],
    ) -> ReadOut:
        """Note a step's results; which of its new tokens are left.

        Args:
            request: before the new tokens are added to it.
            found: the step's results, None where it has none.
            num_tokens: of the request in the step, drafts not counted.
            new_token_ids: what the step has sampled; none before the prompt's end.

        """
        tokens = list(new_token_ids)
        if found is None:
            return ReadOut(tokens)
        state = self._states[request.request_id]
        start, stop = found.start, None
        if tokens:
            # With drafts a step is prepared before it is known how many of the last
            # one's were rejected; the request has only what was accepted.
            start = request.num_tokens - num_tokens
            stop = request.num_tokens + len(tokens) - 1
        parts = []
        for part in found.parts:
            ranges = state.by_name[part.name].ranges
            part.start += start - found.start
            parts += _counting(part, ranges, state.next_position, stop)
        last = max((part.start + part.count for part in found.parts), default=0)
        state.next_position = max(state.next_position, min(last, stop or last))
        left, fired = self._ended(request, state, parts, tokens)
        vars(request).setdefault(_PARTS, []).extend(
            part for one in parts for part in _below(one, left)
        )
        if left is not None:
            tokens = tokens[: left - request.num_tokens]
        return ReadOut(tokens, fired)

    def _ended(
        self,
        request: "Request",
        state: _State,
        parts: Sequence[ReadoutPart],
        tokens: Sequence[int],
    ) -> tuple[int | None, str]:
        """The position behind the first token that fires, and the stop reason."""
        if not state.plan.stop_when or not tokens:
            return None, ""
        first: tuple[int, str] | None = None
        for rule in state.plan.stop_when:
            readout = state.by_name[rule.readout]
            for part in parts:
                if part.name != rule.readout or part.error:
                    continue
                at = _first_firing(part, readout, rule, request.num_prompt_tokens)
                if at is not None and (first is None or at < first[0]):
                    first = at, rule.readout
        if first is None:
            return None, ""
        return first[0] + 1, f"{STOP_PREFIX}{first[1]}"


_PARTS = "readout_parts"


def take_parts(request: "Request") -> list[ReadoutPart] | None:
    """The results of a request that no output has carried yet; None for none."""
    return vars(request).pop(_PARTS, None) or None


def _counting(
    part: ReadoutPart, ranges: Ranges, least: int, stop: int | None
) -> list[ReadoutPart]:
    """What of a part is wanted, new, and of tokens that were accepted."""
    if part.reduced:
        return [part] if part.start >= least else []
    found = []
    for first, last in ranges:
        low = max(first, least, part.start)
        high = min(last, part.start + part.count)
        high = high if stop is None else min(high, stop)
        if low < high:
            found.append(_between(part, low, high))
    return found


def _below(part: ReadoutPart, stop: int | None) -> list[ReadoutPart]:
    if stop is None or part.start + part.count <= stop:
        return [part]
    return [_between(part, part.start, stop)] if part.start < stop else []


def _between(part: ReadoutPart, low: int, high: int) -> ReadoutPart:
    if part.reduced or (low == part.start and high == part.start + part.count):
        return part
    rows = slice(low - part.start, high - part.start)
    own = {name: one[rows] for name, one in part.arrays.items()}
    return ReadoutPart(part.name, low, high - low, own, error=part.error)


def _first_firing(
    part: ReadoutPart, readout: Readout, rule: StopWhen, num_prompt_tokens: int
) -> int | None:
    """The first generated token of a part at which a rule fires."""
    values = values_of(part, readout, rule.index)
    for offset in range(max(num_prompt_tokens - part.start, 0), part.count):
        if rule.fires(float(values[offset])):
            return part.start + offset
    return None


def values_of(
    part: ReadoutPart, readout: Readout, index: int
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The value `[count]` that a rule is about; NaN where there is none."""
    missing = np.full(part.count, np.nan, dtype=np.float32)
    arrays = part.arrays
    if readout.kind == "sae":
        if readout.features:
            column = readout.features.index(index)
            return np.asarray(arrays["activations"][:, column])
        hits = arrays["features"] == index
        return np.where(hits, arrays["activations"], 0.0).sum(axis=1)
    name = {"norm": "norm", "lens": "token_logprobs"}.get(readout.kind, "values")
    flat = arrays[name].reshape(part.count, -1) if name in arrays else missing[:, None]
    return np.asarray(flat[:, index]) if index < flat.shape[1] else missing
