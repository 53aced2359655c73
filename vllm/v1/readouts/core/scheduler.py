# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part of readouts: which results are valid, and `stop_when`.

A row belongs to a token that was fed to the model, and the step that computes it
samples the next token. When a token's value ends its request, the next token has
therefore been sampled already and is dropped. With asynchronous scheduling another step
may be in flight; its output is dropped like that of any finished request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger
from vllm.v1.readouts.firing import first_firing
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import (
    Readout,
    ReadoutPart,
    ReadoutPlan,
    StepReadouts,
)
from vllm.v1.residual.spans import Spans

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

STOP_PREFIX = "readout:"
"""Prefix of `stop_reason`, followed by the readout's name."""


class ReadOut(NamedTuple):
    """The outcome of a step's readouts for a request."""

    token_ids: list[int]
    """The new tokens that remain."""
    fired: str = ""
    """The stop reason if a readout ends the request after these tokens, else empty."""


@dataclass(slots=True)
class _State:
    plan: ReadoutPlan
    by_name: Mapping[str, Readout]
    next_position: int = 0
    """The first position without a result.

    A preempted request recomputes earlier ones, which are then ignored.
    """

    def counting(
        self, step: StepReadouts, request: "Request", num_tokens: int, sampled: int
    ) -> list[ReadoutPart]:
        """The results of a step that count, with corrected positions."""
        req_id, position = request.request_id, request.num_tokens - 1
        if sampled == num_tokens == 1 and self.next_position <= position:
            # As of most requests in most steps.
            parts = step.token_at(req_id, position)
            if parts is not None:
                if parts:
                    self.next_position = position + 1
                return parts
        found = step.get(req_id)
        if found is None:
            return []
        start, stop = found.start, None
        if sampled:
            # With draft tokens a step is prepared before it is known how many drafts
            # of the previous one were rejected; the request has the accepted ones.
            start = request.num_tokens - num_tokens
            stop = request.num_tokens + sampled - 1
        parts = []
        for part in found.parts:
            ranges = self.by_name[part.name].ranges
            part.start += start - found.start
            parts += _counting(part, ranges, self.next_position, stop)
        last = max((part.start + part.count for part in found.parts), default=0)
        self.next_position = max(self.next_position, min(last, stop or last))
        return parts


class ReadoutScheduling:
    """The requests with readouts in this engine. Part of the scheduler."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._states

    def add_request(self, request: "Request") -> None:
        """Track a new request if it has readouts."""
        params = request.sampling_params
        plan = params._capture_plan if params is not None else None
        if plan is not None and plan.readouts is not None:
            by_name = {one.name: one for one in plan.readouts.readouts}
            self._states[request.request_id] = _State(plan.readouts, by_name)

    def forget(self, request: "Request") -> None:
        """Drop the state of a finished request."""
        self._states.pop(request.request_id, None)

    def take(
        self,
        request: "Request",
        step: StepReadouts,
        num_tokens: int,
        new_token_ids: list[int],
    ) -> ReadOut:
        """Store a step's results and apply the request's stop conditions.

        Args:
            request: before the new tokens are appended to it.
            step: the step's results.
            num_tokens: the request's tokens in the step, without draft tokens.
            new_token_ids: the tokens that the step sampled; empty while the prompt is
                still being computed.

        Returns:
            The new tokens that remain, and the stop reason if a readout fired.

        """
        state, tokens, fired = self._states[request.request_id], new_token_ids, ""
        try:
            parts = state.counting(step, request, num_tokens, len(tokens))
            if state.plan.stop_when and tokens:
                left, fired = self._ended(request, state, parts)
                if left is not None:
                    below = [part for part in parts if part.start < left]
                    parts = [_between(part, part.start, left) for part in below]
                    tokens = tokens[: left - request.num_tokens]
        except Exception as error:
            logger.exception("The readouts of %s failed", request.request_id)
            start, fired = request.num_tokens - num_tokens, ""
            parts = [
                ReadoutPart(name, start, num_tokens, {}, error=described(error))
                for name in state.by_name
            ]
        vars(request).setdefault(_PARTS, []).extend(parts)
        return ReadOut(tokens, fired)

    def take_reduced(self, request: "Request", step: StepReadouts) -> None:
        """Store what workers have reduced of a prompt in a step that is dropped."""
        found = step.get(request.request_id)
        reduced = [part for part in found.parts if part.reduced] if found else []
        vars(request).setdefault(_PARTS, []).extend(reduced)

    def _ended(
        self,
        request: "Request",
        state: _State,
        parts: Sequence[ReadoutPart],
    ) -> tuple[int | None, str]:
        """The position after the first token that fires, and the stop reason."""
        assert request.sampling_params is not None, "it generates tokens"
        # As for upstream's stop tokens and strings.
        least = request.num_prompt_tokens + request.sampling_params.min_tokens - 1
        first: tuple[int, str] | None = None
        for rule in state.plan.stop_when:
            readout = state.by_name[rule.readout]
            for part in parts:
                if part.name != rule.readout or part.error:
                    continue
                part.unpack()
                at = first_firing(
                    part, readout, rule, max(least, request.num_prompt_tokens)
                )
                if at is not None and (first is None or at < first[0]):
                    first = at, rule.readout
        if first is None:
            return None, ""
        return first[0] + 1, f"{STOP_PREFIX}{first[1]}"


_PARTS = "readout_parts"


def take_parts(request: "Request") -> list[ReadoutPart] | None:
    """Remove and return the request's results that its next output carries."""
    parts: list[ReadoutPart] | None = vars(request).pop(_PARTS, None)
    for part in parts or ():
        if part.arrays:
            part.pack()
    return parts or None


def _counting(
    part: ReadoutPart, ranges: Spans, least: int, stop: int | None
) -> list[ReadoutPart]:
    """The parts of `part` within `ranges`, from `least` on and below `stop`."""
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


def _between(part: ReadoutPart, low: int, high: int) -> ReadoutPart:
    high = min(high, part.start + part.count)
    if part.reduced or (low == part.start and high == part.start + part.count):
        return part
    part.unpack()
    rows = slice(low - part.start, high - part.start)
    own = {name: one[rows] for name, one in part.arrays.items()}
    return ReadoutPart(part.name, low, high - low, own, error=part.error)
