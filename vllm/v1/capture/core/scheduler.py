# SPDX-License-Identifier: Apache-2.0
"""Capture in the scheduler: how many rows a step may take, and requests' ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.capture.plan import CaptureEnd, CapturePlan
from vllm.v1.residual.sizes import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def plan_of(request: "Request") -> CapturePlan | None:
    """The capture plan that admission gave a request, if any."""
    params = request.sampling_params
    return params._capture_plan if params is not None else None


def scheduling_lag(vllm_config: "VllmConfig") -> int:
    """By how many tokens a step's positions may be assumed too high.

    An asynchronous scheduler prepares a step before it knows how many drafts of the
    step before are rejected, and assumes none; with pipeline stages, of as many steps
    as there are stages.
    """
    drafts: int = vllm_config.num_speculative_tokens
    if not vllm_config.scheduler_config.async_scheduling:
        return 0
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return drafts * stages


def cacheable_tokens(request: "Request", num_tokens: int) -> int:
    """How many of a request's first `num_tokens` the prefix cache may serve.

    A cached block is not computed again, so no row of it can be captured: reuse
    ends at the lowest captured prompt position.
    """
    plan = plan_of(request)
    first = plan.first_prompt_row if plan is not None else None
    return num_tokens if first is None else min(num_tokens, first)


def note_forgone(
    manager: "KVCacheManager", request: "Request", num_cached: int
) -> None:
    """How many more tokens the prefix cache would have served without the capture."""
    if cacheable_tokens(request, request.num_tokens - 1) < request.num_tokens - 1:
        _, reachable, _ = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        request.capture_forgone = reachable - num_cached  # type: ignore[attr-defined]


def loadable_tokens(request: "Request", local: int, external: int) -> int:
    """How many of `external` tokens a cache outside of the engine may serve.

    They follow `local` tokens of the engine's own cache. All or none: a connector has
    made its plan for what it offered.
    """
    return (
        external
        if cacheable_tokens(request, local + external) >= (local + external)
        else 0
    )


class CaptureScheduling:
    """Bounds the captured rows of a step, and carries ends to the workers."""

    def __init__(self, rows_per_step: int, tokens_per_step: int) -> None:
        """Begin; a step computes at most so many tokens, and stages so many rows."""
        self.counts = False
        """Whether a step could have too many rows, so that they must be counted."""
        self._most_taps = rows_per_step // tokens_per_step
        self._large: set[str] = set()
        """The requests for whose sake rows are counted."""
        self._rows_per_step = rows_per_step
        self._rows = 0
        """Of the step, without what is not counted yet."""
        self._uncounted: list[tuple[CapturePlan, int, int]] = []
        self._at_most = 0
        """Rows of the step, if every token had a row at every tap of its request."""
        self._ends: list[CaptureEnd] = []
        self._plans: dict[str, tuple[CapturePlan, int]] = {}
        """Of each captured request, and how many rows a token of it has at most."""
        self._reforwarded = 0

    def add_request(self, request: "Request") -> None:
        """A request has come to this engine."""
        plan = plan_of(request)
        if plan is not None:
            self._plans[request.request_id] = plan, plan.num_taps
            if plan.num_taps > self._most_taps:
                self._large.add(request.request_id)
                self.counts = True

    def forget(self, request_id: str) -> bool:
        """Whether a request that has ended was this engine's, which is asked once.

        Under data parallelism every engine hears of every end, and only the one
        that had the request may answer.
        """
        self._large.discard(request_id)
        self.counts = bool(self._large)
        return self._plans.pop(request_id, None) is not None

    def new_step(self) -> None:
        """A step is about to be scheduled."""
        self._rows = self._at_most = 0
        self._uncounted.clear()

    def limit(self, request: "Request", computed: int, num_tokens: int) -> int:
        """How many of `num_tokens`, from position `computed` on, fit this step.

        What does not fit is scheduled in a later step: nothing fails, no row is
        lost. To be asked while rows are counted.
        """
        found = self._plans.get(request.request_id)
        if found is None or num_tokens <= 0:
            return num_tokens
        plan, taps = found
        if self._at_most + num_tokens * taps <= self._rows_per_step:
            return num_tokens
        left = self._rows_per_step - self._count()
        if plan.rows_in(computed, computed + num_tokens) <= left:
            return num_tokens
        low, high = 0, num_tokens  # rows_in grows with the number of tokens
        while low < high:
            middle = (low + high + 1) // 2
            if plan.rows_in(computed, computed + middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def scheduled(self, request: "Request", computed: int, num_tokens: int) -> None:
        """The step will compute these tokens of the request; while rows are counted."""
        found = self._plans.get(request.request_id)
        if found is not None:
            plan, taps = found
            self._at_most += num_tokens * taps
            self._uncounted.append((plan, computed, num_tokens))

    def begins(self, request: "Request") -> None:
        """The request is among those that run, from this step on."""
        # Known since the cache was asked, which may be some steps ago.
        self._reforwarded += vars(request).pop("capture_forgone", 0)

    def _count(self) -> int:
        """The step's rows so far. Counted only if their bound does not suffice."""
        for plan, computed, num_tokens in self._uncounted:
            self._rows += plan.rows_in(computed, computed + num_tokens)
        self._uncounted.clear()
        self._at_most = self._rows
        return self._rows

    def add_ends(self, ends: Sequence[CaptureEnd]) -> None:
        """Requests that have ended; the next step's output carries them."""
        self._ends.extend(ends)

    def take_reforwarded(self) -> int:
        """Cached tokens that this step begins to compute again for their rows."""
        tokens, self._reforwarded = self._reforwarded, 0
        return tokens

    def take_ends(self) -> list[CaptureEnd] | None:
        """The ends to send with this step, None where there are none."""
        ends, self._ends = self._ends, []
        return ends or None


def capture_scheduling(vllm_config: "VllmConfig") -> CaptureScheduling:
    """The scheduler's part of capture for a configuration."""
    config = vllm_config.capture_config
    return CaptureScheduling(
        config.rows_per_step(row_bytes(vllm_config.model_config)),
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
