# SPDX-License-Identifier: Apache-2.0
"""Capture in the scheduler: rows of a step, ends of requests, stored rows."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.capture.core.row_store import RowStore, may_store
from vllm.v1.residual.capture_plan import CaptureEnd, CapturePlan
from vllm.v1.residual.capture_step import CaptureStep
from vllm.v1.residual.sizes import row_bytes
from vllm.v1.residual.tap import Tap, shape_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


_STORE = "row_store"
"""Attribute of a request whose rows may come from the activation store."""


def plan_of(request: "Request") -> CapturePlan | None:
    """The capture plan of a request, None if it is not captured."""
    params = request.sampling_params
    return params._capture_plan if params is not None else None


def cacheable_tokens(request: "Request", num_tokens: int) -> int:
    """How many of a request's first `num_tokens` tokens may come from the prefix cache.

    Cached tokens are not computed, so they cannot be captured: reuse ends at the lowest
    captured prompt position whose row is not stored.
    """
    store: RowStore | None = vars(request).get(_STORE)
    if store is not None:
        return store.reusable(request, num_tokens)
    return _before_rows(request, num_tokens)


def _before_rows(request: "Request", num_tokens: int) -> int:
    """How many of a request's first `num_tokens` tokens precede its captured ones."""
    plan = plan_of(request)
    first = plan.first_prompt_row if plan is not None else None
    return num_tokens if first is None else min(num_tokens, first)


def note_forgone(
    manager: "KVCacheManager", request: "Request", num_cached: int
) -> None:
    """Store in the request how many more tokens would be cached without the capture."""
    if cacheable_tokens(request, request.num_tokens - 1) < request.num_tokens - 1:
        _, reachable, _ = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        request.capture_forgone = reachable - num_cached  # type: ignore[attr-defined]


def loadable_tokens(request: "Request", local: int, external: int) -> int:
    """How many of `external` tokens may be loaded from an external cache: all or none.

    They follow `local` tokens of the engine's own cache. A connector has planned to
    load all that it offered, so a part of it is not possible.
    """
    tokens = local + external
    return external if _before_rows(request, tokens) == tokens else 0


class CaptureScheduling:
    """Limits the captured rows of a step, and holds ends for the next step.

    Belongs to the engine core's thread. Rows are counted only while `counts` is true:
    if no request has more taps than fit every token of a full step, no step can exceed
    the limit.
    """

    def __init__(
        self,
        rows_per_step: int,
        tokens_per_step: int,
        store: RowStore | None = None,
    ) -> None:
        """Start without requests.

        Args:
            rows_per_step: how many rows a step may stage.
            tokens_per_step: how many tokens a step computes at most.
            store: the activation store, if there is one.

        """
        self.store = store
        """The activation store, if there is one."""
        self.counts = False
        """Whether a step could exceed the limit, so that rows must be counted."""
        self._most_taps = rows_per_step // tokens_per_step
        self._large: set[str] = set()
        """The requests with more taps than `_most_taps`."""
        self._rows_per_step = rows_per_step
        self._rows = 0
        """Rows of the step, without those in `_uncounted`."""
        self._uncounted: list[tuple[CapturePlan, int, int]] = []
        self._at_most = 0
        """Upper bound of the step's rows: every token has a row at each tap."""
        self._ends: list[CaptureEnd] = []
        self._plans: dict[str, tuple[CapturePlan, int]] = {}
        """By request: its plan, and the number of its taps."""
        self._awaited: set[str] = set()
        """The requests whose end is awaited, because consumers get something of them.
        """
        self._reforwarded = 0

    def add_request(self, request: "Request") -> None:
        """Register a request that was added to this engine."""
        plan = plan_of(request)
        if plan is not None:
            taps = plan.num_taps
            self._plans[request.request_id] = plan, taps
            if taps > self._most_taps:
                self._large.add(request.request_id)
                self.counts = True
            if plan.lanes:
                self._awaited.add(request.request_id)
            if self.store is not None and may_store(request, plan):
                self.store.add_request(request, plan)
                vars(request)[_STORE] = self.store

    def free(self, request: "Request") -> None:
        """Remove a request that has finished in this engine; its end may follow."""
        self._plans.pop(request.request_id, None)
        self._large.discard(request.request_id)
        self.counts = bool(self._large)
        if self.store is not None:
            self.store.free(request.request_id)

    def ended(self, request_id: str) -> bool:
        """Whether a request whose end has come was captured by this engine.

        Under data parallelism every engine receives every end, and only the one that
        had the request may report its result.
        """
        is_own = request_id in self._awaited
        self._awaited.discard(request_id)
        return is_own

    def new_step(self) -> None:
        """Reset the counts, before a step is scheduled."""
        self._rows = self._at_most = 0
        self._uncounted.clear()
        if self.store is not None:
            self.store.new_step()

    def limit(self, request: "Request", computed: int, num_tokens: int) -> int:
        """How many of `num_tokens` tokens, from position `computed` on, fit this step.

        The rest is scheduled in later steps. Only to be called while `counts` is true.
        """
        known = self._plans.get(request.request_id)
        if known is None or num_tokens <= 0:
            return num_tokens
        plan, taps = known
        if self._at_most + num_tokens * taps <= self._rows_per_step:
            return num_tokens
        left = max(self._rows_per_step - self._count(), 0)
        return _fitting(plan, computed, num_tokens, left)

    def limit_alone(self, request: "Request", computed: int, num_tokens: int) -> int:
        """As `limit`, if the request was alone in a step."""
        plan = plan_of(request)
        if plan is None:
            return num_tokens
        return _fitting(plan, computed, num_tokens, self._rows_per_step)

    def scheduled(self, request: "Request", computed: int, num_tokens: int) -> None:
        """Count scheduled tokens; only to be called while `counts` is true."""
        known = self._plans.get(request.request_id)
        if known is not None:
            plan, taps = known
            self._at_most += num_tokens * taps
            self._uncounted.append((plan, computed, num_tokens))

    def begin(self, request: "Request", computed: int) -> None:
        """Begin a request of which `computed` tokens are cached."""
        if _STORE in vars(request):
            vars(request)[_STORE].begin(request, computed)
        # Set by `note_forgone`, perhaps some steps ago.
        self._reforwarded += vars(request).pop("capture_forgone", 0)

    def _count(self) -> int:
        """The exact number of rows of the step so far; tightens `_at_most`."""
        for plan, computed, num_tokens in self._uncounted:
            self._rows += plan.rows_in(computed, computed + num_tokens)
        self._uncounted.clear()
        self._at_most = self._rows
        return self._rows

    def add_ends(self, ends: Sequence[CaptureEnd]) -> None:
        """Add ends to send with the next scheduler output."""
        self._ends.extend(ends)

    def take_step(self) -> CaptureStep | None:
        """Return and clear what the next step carries; None if that is nothing."""
        tokens, self._reforwarded = self._reforwarded, 0
        changes = [] if self.store is None else self.store.take_changes()
        step = CaptureStep(self.take_ends(), tokens, changes)
        return step if any(step) else None

    def take_ends(self) -> list[CaptureEnd]:
        """Return and clear the ends to send with this step."""
        ends, self._ends = self._ends, []
        return ends


def _fitting(plan: CapturePlan, computed: int, num_tokens: int, rows: int) -> int:
    """How many of `num_tokens` tokens have at most `rows` rows."""

    def rows_of(count: int) -> int:  # It grows with the number of tokens.
        return plan.rows_in(computed, computed + count)

    if rows_of(num_tokens) <= rows:
        return num_tokens
    return bisect_right(range(num_tokens), rows, key=rows_of) - 1


def capture_scheduling(vllm_config: "VllmConfig", block_size: int) -> CaptureScheduling:
    """Create the `CaptureScheduling` of an engine core, whose blocks have this size."""
    config, size = vllm_config.capture_config, row_bytes(vllm_config.model_config)
    hidden_size = vllm_config.model_config.get_hidden_size()

    def tap_bytes(tap: Tap) -> int:
        shape = shape_of(config.point_shapes, tap, hidden_size)
        return shape.width * size // hidden_size

    limits = config.store_bytes, config.store_disk_bytes
    return CaptureScheduling(
        config.rows_per_step(size),
        vllm_config.scheduler_config.max_num_batched_tokens,
        RowStore(block_size, tap_bytes, *limits) if config.store_bytes else None,
    )
