# SPDX-License-Identifier: Apache-2.0
"""The interface between the model runners and capture, steering and readouts.

A model runner has one `ResidualStream` and calls it at fixed points of a step: `update`
after the scheduler's output was applied, `plan_step` when the order of the batch is
known, `begin_step` before the forward pass and `end_step` after it. Only the views in
`residual_views.py` depend on how the two runners store their batch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.v1.capture.worker.worker import WorkerCapture
from vllm.v1.hooks.worker.worker import WorkerHooks
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.worker import WorkerReadouts
from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.plain_tensors import packed, unpacked
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.steering_actions import Acting, Action
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Shapes
from vllm.v1.steering.worker.worker import WorkerSteering
from vllm.v1.worker.nonfinite_rows import clear_nonfinite_rows
from vllm.v1.worker.residual_graph_choice import GraphFamilies
from vllm.v1.worker.residual_graphs import NOTHING, Ops, without_graph
from vllm.v1.worker.step_additions import NOTES, Additions, attach
from vllm.v1.worker.step_consumers import StepConsumers

if TYPE_CHECKING:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        ModelCudaGraphManager,
    )
    from vllm.v1.worker.gpu.input_batch import InputBatch as DeviceBatch

logger = init_logger(__name__)

HookPoints = dict[int, list[str]]


class ResidualStream:
    """The null object, used if nothing can be captured or steered, and base class."""

    def __init__(self, hook_points: HookPoints) -> None:
        self.hook_points = hook_points
        """The hook points of this process's layers, by layer index."""
        self.point_shapes: Shapes = {}
        """The shapes of those that differ from the stream's."""
        self.missing: dict[str, str] = {}
        """Why the enabled points are not there that no layer has."""
        self.staging: dict[str, int] = {}
        """The rank of this process, and the bytes of its staging memory."""
        self.checks_streams = False
        """Whether this step is checked for NaN and infinity."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Process new and ended requests; called once per step."""
        *_, self.checks_streams = scheduler_output.residual

    def clear_nonfinite(
        self, hidden: torch.Tensor, batch: "DeviceBatch"
    ) -> torch.Tensor | None:
        """Zero non-finite rows before sampling (V2 runner).

        With draft tokens a request has several rows; the first, which is not a draft's,
        is checked.

        Returns:
            The number of non-finite values by request, `[R]` int32; None if this step
            is not checked.

        """
        if not self.checks_streams:
            return None
        firsts = batch.cu_num_logits[: batch.num_reqs]
        return clear_nonfinite_rows(hidden, batch.logits_indices, firsts)

    def plan_step(self, view: Callable[[], StepView]) -> None:
        """Determine what the step captures and steers.

        Args:
            view: creates the view of the step; not called if nothing is to be done.

        """

    def choose_graph(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The graph to run in place of the plain graph `descriptor`."""
        return descriptor

    def dispatch_graph(
        self, mode: "CUDAGraphMode", descriptor: "BatchDescriptor"
    ) -> "BatchDescriptor":
        """The key of the graph to run in place of the plain one's (V1 runner)."""
        return descriptor

    def begin_step(self, num_rows: int) -> None:
        """Write what the forward pass over `num_rows` rows (with padding) reads."""

    def end_step(self, attention: Any) -> None:
        """Called after the forward pass is queued on the device.

        Args:
            attention: what upstream gives its attention layers, by their names.

        """

    steering: WorkerSteering | None = None
    """Set if steering is enabled."""
    readouts: WorkerReadouts | None = None
    """Set if readouts are enabled."""
    steps: StepConsumers | None = None
    """Set if consumers run within the step."""
    hooks: WorkerHooks | None = None
    """Set if requests can have hook functions."""
    modules: WorkerModules | None = None
    """The named probes, translators and SAEs, if capture or steering is enabled."""

    def with_readouts(self, output: Any) -> Any:
        """Attach the readouts of the step to the runner's output."""
        return output

    def send_rows(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors to send to the next pipeline stage."""
        return tensors

    def receive_rows(self, tensors: dict[str, Any], wait: Callable[[], None]) -> None:
        """Take what `send_rows` has added out of received tensors.

        Args:
            tensors: the intermediate tensors of a step, which may still arrive.
            wait: returns when they have.

        """

    def end_captures(self, ends: Sequence[CaptureEnd]) -> None:
        """Finish the captures of requests that have ended."""

    def report_captures_to(self, address: str) -> None:
        """Report counters to the front end at `address`."""

    def before_sleep(self) -> None:
        """Called before device memory is offloaded to the host or discarded."""

    def close(self) -> None:
        """Deliver pending rows and release resources."""


class OpenResidualStream(ResidualStream):
    """The residual stream of a model whose layers have taps."""

    def __init__(
        self,
        hook_points: HookPoints,
        capture: WorkerCapture | None,
        steering: WorkerSteering | None,
        graphs: GraphFamilies,
        hooks: WorkerHooks | None = None,
    ) -> None:
        """Start without requests.

        Args:
            hook_points: the hook points of this process's layers.
            capture: None if capture is disabled.
            steering: None if steering is disabled.
            graphs: chooses the CUDA graph of each step.
            hooks: None if requests cannot have hook functions.

        """
        super().__init__(hook_points)
        self._capture = capture
        if capture is not None:
            self.staging = capture.staging_facts
        readouts = None if capture is None else capture.readouts
        self.readouts = cast("WorkerReadouts | None", readouts)
        self.steering = steering
        self.hooks = hooks
        self._graphs = graphs
        self._failed: dict[str, str] = {}
        """The requests that must end, with the first reason of each."""
        self._arriving: torch.Tensor | None = None
        """The notes of earlier pipeline stages, which may still arrive."""
        self._acting: Acting | None = None
        """What consumers made act in the current step."""
        self._req_ids: Sequence[str] = ()
        """The requests of the planned step."""
        self._is_idle = False
        """Whether the planned step neither captures nor steers."""
        self._rests = False
        """Whether the step before did not either, so that no state must be reset."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Process new and ended requests; called once per step."""
        super().update(scheduler_output)
        begun = scheduler_output.scheduled_new_reqs
        finished = scheduler_output.finished_req_ids
        captures, steps, _ = scheduler_output.residual
        if self.steering is not None and (begun or finished or steps is not None):
            lengths = [(new.req_id, new.prompt_len) for new in begun]
            failed = self.steering.update(finished, lengths, steps)
            self._failed = {**failed, **self._failed}
        if self.hooks is not None:
            self.hooks.end_requests(finished)
            self.hooks.restart(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
            for new in begun:
                params = new.sampling_params
                if params is not None and params._hooks is not None:
                    self.hooks.add_request(new.req_id, params._hooks, new.prompt_len)
        if self.steps is not None:
            self.steps.begin_step()
            self.steps.end_requests(finished)
            self.steps.begin_requests(
                (new.req_id, new.prompt_token_ids, new.sampling_params.conversation_id)
                for new in begun
                if new.sampling_params is not None
            )
            self._acting = self.steps.acting
        if self._capture is None:
            return
        self._capture.end_reading(finished)
        for new in begun:
            params = new.sampling_params
            if params is not None and params._capture_plan is not None:
                lora = new.lora_request
                self._capture.add_request(
                    new.req_id,
                    params._capture_plan,
                    new.prompt_token_ids,
                    params.capture,
                    params.max_tokens,
                    0 if lora is None else lora.lora_int_id,
                )
        if captures is not None:
            self._capture.note_reforwarded(captures.reforwarded)
            self._capture.store(captures.stored)
            if captures.ends:
                self.end_captures(captures.ends)

    def plan_step(self, view: Callable[[], StepView]) -> None:
        """Determine which rows the step captures, and what steers each row."""
        self._is_idle = self._nothing_to_do()
        self._rests = self._rests and self._is_idle
        if self._rests:
            return
        step = view()
        steers = captures = NOTHING
        self._req_ids = step.req_ids
        if self.steering is not None:
            try:
                steers = self.steering.plan_step(step)
            except Exception as error:
                steers = self._unsteered(error)
        if self.hooks is not None:
            try:
                steers |= self.hooks.plan_step(step)
            except Exception as error:
                self.hooks.fail(step.req_ids, error)
        if self._capture is not None:
            try:
                captures = self._capture.plan_step(step)
            except Exception as error:
                self._capture.fail(step, error)
        self._graphs.plan(steers, captures)

    def _unsteered(self, error: Exception) -> Ops:
        """Let the planned step go on without steering; the steered requests end."""
        assert self.steering is not None, "only steering ends requests"
        ended = self.steering.steered(self._req_ids)
        logger.exception("Steering failed; the requests of the step that use it end")
        why = f"Steering failed: {described(error)}"
        self._failed = {**dict.fromkeys(ended, why), **self._failed}
        return self.steering.plan_nothing()

    def _nothing_to_do(self) -> bool:
        return (
            (self.steering is None or self.steering.is_idle)
            and (self._capture is None or self._capture.is_idle)
            and (self.hooks is None or self.hooks.is_idle)
        )

    def choose_graph(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The graph with the ops that the step needs."""
        if self.hooks is not None and self.hooks.is_needed:
            return without_graph(descriptor, self.hooks.num_tokens)
        return self._graphs.choose(descriptor, manager)

    def dispatch_graph(
        self, mode: "CUDAGraphMode", descriptor: "BatchDescriptor"
    ) -> "BatchDescriptor":
        """The key of the graph with the ops that the step needs (V1 runner)."""
        return self._graphs.dispatch(mode, descriptor)

    def begin_step(self, num_rows: int) -> None:
        """Write the slots and the table rows of the step."""
        if self._rests:
            return
        if self.steering is not None:
            try:
                self.steering.begin_step()
            except Exception as error:
                self._unsteered(error)
                self.steering.begin_step()
        if self.hooks is not None:
            self.hooks.begin_step()
        if self._capture is not None:
            self._capture.begin_step(num_rows)

    def end_step(self, attention: Any) -> None:
        """Offload the captured rows of the step."""
        if self._rests:
            return
        self._graphs.end()
        if self.steering is not None:
            try:
                self.steering.end_step()
            except Exception as error:
                self._unsteered(error)
        if self.hooks is not None:
            self.hooks.end_step()
        if self._capture is not None:
            self._capture.end_step(attention)
        self._rests = self._is_idle

    def with_readouts(self, output: Any) -> Any:
        """Attach the readouts and receipts of the step to the runner's output."""
        readouts = None if self.readouts is None else self.readouts.take()
        if self.steering is None:
            return attach(output, Additions(readouts))
        doses, fired = self.steering.doses.take(), self.steering.take_fired()
        is_last = get_pp_group().is_last_rank  # Other stages have sent theirs.
        failed, actions = self._take_notes() if is_last else ({}, [])
        more = actions or None, failed or None, self._acting
        return attach(output, Additions(readouts, doses, fired, *more))

    def _take_notes(self) -> tuple[dict[str, str], list[Action]]:
        """The failed requests and the actions of this stage and of earlier ones."""
        arriving, self._arriving = self._arriving, None
        failed, actions = ({}, []) if arriving is None else unpacked(arriving)
        own, self._failed = self._failed, {}
        taken = [] if self.steps is None else self.steps.take()
        return {**failed, **own}, [*actions, *taken]

    def send_rows(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors to send on, with readouts, rows, gates and doses."""
        if any(notes := self._take_notes()):
            tensors = {**tensors, NOTES: packed(notes)}
        if self.readouts is not None:
            tensors = self.readouts.send(tensors)
        return tensors if self.steering is None else self.steering.send(tensors)

    def receive_rows(self, tensors: dict[str, Any], wait: Callable[[], None]) -> None:
        """Take what earlier stages have added out of received tensors."""
        self._arriving = tensors.pop(NOTES, None)
        if self.readouts is not None:
            self.readouts.receive(tensors)
        if self.steering is not None:
            self.steering.receive(tensors, wait)

    def end_captures(self, ends: Sequence[CaptureEnd]) -> None:
        """Finish the captures of requests that have ended."""
        assert self._capture is not None, "a capture ends but capture is disabled"
        self._capture.end_requests(ends)

    def report_captures_to(self, address: str) -> None:
        """Report counters to the front end at `address`."""
        if self._capture is not None:
            self._capture.report_to(address)

    def before_sleep(self) -> None:
        """Copy captured rows to the host, as requests may end during the sleep."""
        if self._capture is not None:
            self._capture.send()

    def close(self) -> None:
        """Deliver pending rows and shut down the consumers."""
        if self.steps is not None:
            self.steps.close()
        if self._capture is not None:
            self._capture.close()
