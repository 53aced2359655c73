# SPDX-License-Identifier: Apache-2.0
"""Hook functions in one worker process, called by the model runner's adapter."""

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.residual.host_calls import HostCall, HostCalls
from vllm.v1.hooks.plan import GROUP, HookPlan, HookSpec
from vllm.v1.hooks.results import HookResult, encode
from vllm.v1.hooks.worker.context import HookContext
from vllm.v1.hooks.worker.parameters import Parameters
from vllm.v1.residual.plugin_errors import described, is_interrupt
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Tap

logger = init_logger(__name__)

MOST_KEPT = 256
"""Most finished requests whose results are kept until taken; older ones are dropped."""

HookFunction = Callable[[HookContext, torch.Tensor], torch.Tensor | None]


@dataclass(slots=True)
class Running:
    """A function of a request, and its saved values."""

    spec: HookSpec
    function: HookFunction | None
    """The function; None if it could not be loaded."""
    saved: dict[Any, Any] = field(default_factory=dict)
    error: str = ""
    """Its error message; after an error it is not called again."""


@dataclass(slots=True)
class HookedRequest:
    """A request with functions; `by_tap` keeps the order of their list."""

    req_id: str
    plan: HookPlan
    num_prompt_tokens: int
    running: list[Running]
    by_tap: dict[Tap, list[Running]]


class WorkerHooks:
    """Calls the functions of requests in their steps. Engine thread only.

    All ranks of a pipeline stage make the same calls; the results are those of rank 0.
    """

    def __init__(
        self, model: nn.Module, addresses: Mapping[Tap, int], reports: bool
    ) -> None:
        """Start without requests.

        Args:
            model: the loaded model.
            addresses: address of the program index at each tap of this process.
            reports: whether this rank's results are taken.

        """
        self.parameters = Parameters(model)
        self._model = model
        self._addresses = addresses
        self._reports = reports
        self._requests: dict[str, HookedRequest] = {}
        self._ended: dict[str, HookedRequest] = {}
        """Finished requests by the plan's key, in the order of their ends."""
        self._calls: dict[int, list[HostCall]] = {}
        self._complained: set[str] = set()
        self.num_tokens = 0
        """Number of rows of the planned step, without padding."""

    @property
    def is_idle(self) -> bool:
        """Whether no running request has functions."""
        return not self._requests

    @property
    def is_needed(self) -> bool:
        """Whether the planned step calls a function."""
        return bool(self._calls)

    def add_request(self, req_id: str, plan: HookPlan, num_prompt_tokens: int) -> None:
        """Load a request's functions; after a preemption the request starts again."""
        running = [self._loaded(spec) for spec in plan.hooks]
        by_tap: dict[Tap, list[Running]] = {}
        for one in running:
            for layer in one.spec.layers:
                by_tap.setdefault((layer, one.spec.point), []).append(one)
        request = HookedRequest(req_id, plan, num_prompt_tokens, running, by_tap)
        self._requests[req_id] = request

    def restart(self, resumed: Iterable[str]) -> None:
        """Start requests again that a runner continues after a preemption."""
        for request in filter(None, map(self._requests.get, resumed)):
            self.add_request(request.req_id, request.plan, request.num_prompt_tokens)

    def end_requests(self, finished: Iterable[str]) -> None:
        """Keep the results of finished requests until they are taken."""
        for req_id in finished:
            request = self._requests.pop(req_id, None)
            if request is not None and self._reports:
                self._ended[request.plan.key] = request
        while len(self._ended) > MOST_KEPT:
            self._ended.pop(next(iter(self._ended)))

    def plan_step(self, view: StepView) -> frozenset[int]:
        """Plan the calls of a step; returns the addresses of the ops that make them."""
        self._calls = {}
        if not self._requests:
            return frozenset()
        first_row = view.first_row.tolist()
        self.num_tokens = int(view.num_scheduled.sum())
        for number, req_id in enumerate(view.req_ids):
            request = self._requests.get(req_id)
            if request is None:
                continue
            start = int(view.num_computed[number])
            count = int(view.num_scheduled[number])
            row = first_row[number]
            for tap, running in request.by_tap.items():
                if tap not in self._addresses:
                    continue  # Another pipeline stage has the layer.
                calls = self._calls.setdefault(self._addresses[tap], [])
                for one in running:
                    run = partial(
                        self._run, request, one, tap[0], range(start, start + count)
                    )
                    calls.append(HostCall(run, row, row + count))
        return frozenset(self._calls)

    def fail(self, req_ids: Iterable[str], error: Exception) -> None:
        """Let the planned step call nothing; its requests' functions have failed."""
        logger.exception("Hook functions could not be planned")
        self._calls = {}
        for request in filter(None, map(self._requests.get, req_ids)):
            for one in request.running:
                one.error = one.error or described(error)

    def begin_step(self) -> None:
        """Prepare the forward pass of the planned step."""
        HostCalls.at = self._calls

    def end_step(self) -> None:
        """End the step, so that following dummy batches call nothing."""
        HostCalls.at = {}
        self._calls = {}

    def take(self, key: str) -> bytes | None:
        """Remove and return a request's results; None on ranks that have none."""
        request = self._ended.pop(key, None)
        if request is None:  # The engine may not have reported its end yet.
            running = (r for r in self._requests.values() if r.plan.key == key)
            request = next(running, None)
        if request is None or not self._reports:
            return None
        return _encoded(request)

    def _loaded(self, spec: HookSpec) -> Running:
        try:
            return Running(spec, _function(spec))
        except BaseException as error:  # A user's code may raise anything.
            if is_interrupt(error):
                raise
            return Running(spec, None, error=self._described(spec, error))

    def _run(
        self,
        request: HookedRequest,
        one: Running,
        layer: int,
        positions: range,
        rows: torch.Tensor,
    ) -> torch.Tensor | None:
        """Call a function on a copy of the request's rows `[tokens, hidden_size]`."""
        if one.error or one.function is None:
            return None
        context = HookContext(
            layer_idx=layer,
            seq_len=len(rows),
            saved=one.saved,
            positions=positions,
            num_prompt_tokens=request.num_prompt_tokens,
            request_id=request.req_id,
            model=self._model,
            get_parameter=self.parameters.get,
        )
        before = rows.clone()
        try:
            found = one.function(context, rows)
            return _changed(found, rows, before)
        except BaseException as error:  # A user's code may raise anything.
            if is_interrupt(error):
                raise
            one.error = self._described(one.spec, error)
            return None

    def _described(self, spec: HookSpec, error: BaseException) -> str:
        """The error message for the request; logged once per function."""
        name = spec.name or f"number {spec.key}"
        if name not in self._complained:
            self._complained.add(name)
            logger.exception("The hook %s failed", name)
        return described(error)


def _changed(
    found: Any, rows: torch.Tensor, before: torch.Tensor
) -> torch.Tensor | None:
    """The rows that a function returned or changed in place; None if unchanged."""
    if found is None:
        return None if torch.equal(rows, before) else rows
    if not isinstance(found, torch.Tensor) or found.shape != rows.shape:
        shape = tuple(getattr(found, "shape", ()))
        raise TypeError(
            f"it returned {type(found).__name__} {shape}, not a tensor "
            f"{tuple(rows.shape)} or None"
        )
    return found.to(rows)


def _function(spec: HookSpec) -> HookFunction:
    if spec.code:
        import cloudpickle

        function: HookFunction = cloudpickle.loads(spec.code)
        return function
    (found,) = importlib.metadata.entry_points(group=GROUP, name=spec.name)
    params = json.loads(spec.params)
    return partial(found.load(), **params) if params else found.load()


def _encoded(request: HookedRequest) -> bytes:
    result = HookResult({}, {}, {})
    for one in request.running:
        into = result.shared if one.spec.shared else result.own
        into[one.spec.key] = dict(one.saved)
        if one.error:
            result.errors[one.spec.key] = one.error
    try:
        return encode(result, request.plan.pickles)
    except BaseException as error:  # The saved values may be of any type.
        if is_interrupt(error):
            raise
        return encode(HookResult({}, {}, {"saved": described(error)}), False)
