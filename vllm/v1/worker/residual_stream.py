# SPDX-License-Identifier: Apache-2.0
"""The interface between the model runners and capture, steering and readouts.

A model runner has one `ResidualStream` and calls it at fixed points of a step: `update`
after the scheduler's output was applied, `plan_step` when the order of the batch is
known, `begin_step` before the forward pass and `end_step` after it. Only `v1_view` and
`v2_view` depend on how the two runners store their batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.residual import tap as residual_tap
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.copy_guard import guard_copies
from vllm.model_executor.layers.residual.inductor_guard import ask_before_calls
from vllm.model_executor.layers.residual.point import ResidualTap
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.plan import CaptureEnd
from vllm.v1.capture.worker.worker import Stage, WorkerCapture
from vllm.v1.hooks.worker.worker import WorkerHooks
from vllm.v1.readouts.worker.head import ELSEWHERE
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.pending import Additions, attach
from vllm.v1.readouts.worker.stages import UNSLICED as UNSLICED_READOUTS
from vllm.v1.readouts.worker.worker import WorkerReadouts
from vllm.v1.residual.kept_memory import kept_memory
from vllm.v1.residual.sizes import torch_dtype
from vllm.v1.residual.step_view import StepView
from vllm.v1.steering.plan import SteeringTiers, Tap
from vllm.v1.steering.worker.doses import Route
from vllm.v1.steering.worker.worker import WorkerSteering
from vllm.v1.worker.lost_rows import clear_lost_rows
from vllm.v1.worker.residual_graphs import (
    NOTHING,
    GraphFamilies,
    can_record,
    families_at_start,
    without_graph,
)
from vllm.v1.worker.residual_hooks import open_hooks
from vllm.v1.worker.step_consumers import ACTIONS, StepConsumers
from vllm.v1.worker.tapped_layers import TappedLayers, find_tapped_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        ModelCudaGraphManager,
    )
    from vllm.v1.worker.gpu.input_batch import InputBatch as DeviceBatch
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

HookPoints = dict[int, list[str]]

UNSLICED = UNSLICED_READOUTS | {ACTIONS: False}
"""Intermediate tensors that are sent as they are; see `readouts.worker.stages`."""


class ResidualStream:
    """The null object, used if nothing can be captured or steered, and base class."""

    def __init__(self, hook_points: HookPoints) -> None:
        self.hook_points = hook_points
        """The hook points of this process's layers, by layer index."""
        self.checks_streams = False
        """Whether this step is checked for NaN and infinity."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Process new and ended requests; called once per step."""
        self.checks_streams = scheduler_output.checks_streams

    def clear_lost(
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
        return clear_lost_rows(hidden, batch.logits_indices, firsts)

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

    def end_step(self) -> None:
        """Called after the forward pass is queued on the device."""

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
        self.readouts = None if capture is None else capture.readouts
        self.steering = steering
        self.hooks = hooks
        self._graphs = graphs
        self._is_idle = False
        """Whether the planned step neither captures nor steers."""
        self._rests = False
        """Whether the step before did not either, so that no state must be reset."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Process new and ended requests; called once per step."""
        super().update(scheduler_output)
        begun = scheduler_output.scheduled_new_reqs
        finished, steps = scheduler_output.finished_req_ids, scheduler_output.steering
        if self.steering is not None and (begun or finished or steps is not None):
            lengths = [(new.req_id, new.prompt_len) for new in begun]
            self.steering.update(finished, lengths, steps)
        if self.hooks is not None:
            self.hooks.end_requests(finished)
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
        if self._capture is None:
            return
        for new in begun:
            params = new.sampling_params
            if params is not None and params._capture_plan is not None:
                self._capture.add_request(
                    new.req_id,
                    params._capture_plan,
                    new.prompt_token_ids,
                    params.capture,
                    params.max_tokens,
                )
        if scheduler_output.capture_reforwarded:
            self._capture.note_reforwarded(scheduler_output.capture_reforwarded)
        if scheduler_output.capture_ends:
            self.end_captures(scheduler_output.capture_ends)

    def plan_step(self, view: Callable[[], StepView]) -> None:
        """Determine which rows the step captures, and what steers each row."""
        self._is_idle = self._nothing_to_do()
        self._rests = self._rests and self._is_idle
        if self._rests:
            return
        step = view()
        steers = captures = NOTHING
        if self.steering is not None:
            steers = self.steering.plan_step(step)
        if self.hooks is not None:
            steers |= self.hooks.plan_step(step)
        if self._capture is not None:
            captures = self._capture.plan_step(step)
        self._graphs.plan(steers, captures)

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
            self.steering.begin_step()
        if self.hooks is not None:
            self.hooks.begin_step()
        if self._capture is not None:
            self._capture.begin_step(num_rows)

    def end_step(self) -> None:
        """Offload the captured rows of the step."""
        if self._rests:
            return
        self._graphs.end()
        if self.steering is not None:
            self.steering.end_step()
        if self.hooks is not None:
            self.hooks.end_step()
        if self._capture is not None:
            self._capture.end_step()
        self._rests = self._is_idle

    def with_readouts(self, output: Any) -> Any:
        """Attach the readouts and receipts of the step to the runner's output."""
        readouts = None if self.readouts is None else self.readouts.take()
        if self.steering is None:
            return attach(output, Additions(readouts))
        doses, fired = self.steering.doses.take(), self.steering.take_fired()
        actions = None if self.steps is None else self.steps.take()
        return attach(output, Additions(readouts, doses, fired, actions))

    def send_rows(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors to send on, with readouts, rows, gates and doses."""
        if self.readouts is not None:
            tensors = self.readouts.send(tensors)
        if self.steps is not None:
            tensors = self.steps.send(tensors)
        return tensors if self.steering is None else self.steering.send(tensors)

    def receive_rows(self, tensors: dict[str, Any], wait: Callable[[], None]) -> None:
        """Take what earlier stages have added out of received tensors."""
        if self.readouts is not None:
            self.readouts.receive(tensors)
        if self.steps is not None:
            self.steps.receive(tensors)
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


def open_residual_stream(
    vllm_config: "VllmConfig", model: nn.Module, device: torch.device
) -> ResidualStream:
    """Attach taps to a loaded model, before it is compiled and profiled.

    Args:
        vllm_config: the engine's configuration.
        model: the loaded model.
        device: the device of the model.

    Raises:
        ValueError: capture or steering is enabled, but unsupported for the model or
            the configuration; the message says why.

    """
    with kept_memory(vllm_config.model_config):
        return _open(vllm_config, model, device)


def _open(
    vllm_config: "VllmConfig", model: nn.Module, device: torch.device
) -> ResidualStream:
    config = vllm_config.capture_config
    enabled = config.enabled or vllm_config.steering_config.enabled
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    layers = find_tapped_layers(model, config.mlp_points, num_layers, weaves=enabled)
    points = layers.points
    if not enabled:
        Launch.begin(NOTHING, (NOTHING,))
        return ResidualStream(points)
    _check_supported(vllm_config, model, layers)
    stage = Stage(
        get_tensor_model_parallel_rank(),
        get_pp_group().rank_in_group,
        get_pp_group().world_size,
    )
    taps = [(index, point) for index in sorted(points) for point in points[index]]
    width = vllm_config.model_config.get_hidden_size()
    dtype = torch_dtype(vllm_config.model_config)
    capture = steering = None
    # Loaded before memory is profiled, so that they count as part of the model.
    modules = WorkerModules(vllm_config.readout_config, device, dtype)
    if config.enabled:
        readouts = None
        if config.readouts:
            last = layers.modules.get((num_layers - 1, "post_block"))
            readouts = WorkerReadouts(
                vllm_config, modules, model, last[0] if last else None, device
            )
        capture = WorkerCapture(
            vllm_config, stage, taps, width, dtype, device, readouts
        )
    if vllm_config.steering_config.enabled:
        steering = WorkerSteering(
            vllm_config, taps, width, dtype, device, modules.sae, _route_of_doses(stage)
        )
    made = {tap: _tap(tap, capture, steering) for tap in taps}
    for place, (module, run) in layers.modules.items():
        residual_tap.attach(module, place[1], made[place], run)
    logger.info(
        "Residual stream: %d hook points in %d layers; %s; %s",
        len(taps),
        len(points),
        "no capture" if capture is None else capture.summary(),
        "no steering" if steering is None else steering.summary(),
    )
    ask_before_calls()
    guard_copies()
    may_record = can_record(vllm_config)
    graphs = GraphFamilies(
        families_at_start(
            {} if capture is None else capture.addresses,
            {} if steering is None else steering.addresses,
            {} if steering is None else steering.program_addresses,
            may_record,
        ),
        may_record=may_record,
    )
    stream = OpenResidualStream(
        points,
        capture,
        steering,
        graphs,
        open_hooks(vllm_config, model, steering),
    )
    stream.modules = modules
    if config.takes_actions:
        stream.steps = StepConsumers(vllm_config, steering, device, dtype)
        if stream.readouts is not None:
            stream.readouts.on_rows = stream.steps.on_rows
    return stream


def _route_of_doses(stage: Stage) -> Route:
    if stage.pipeline_rank < stage.pipeline_size - 1:
        return Route.NEXT_STAGE
    return Route.OUTPUT if stage.tensor_rank == 0 else Route.NOWHERE


def _tap(
    tap: Tap, capture: WorkerCapture | None, steering: WorkerSteering | None
) -> ResidualTap:
    """Create a tap with the tensors that its ops read and write."""
    slots = base = staging = None
    if capture is not None:
        slots, base, staging = capture.tensors(tap)
    steers = () if steering is None else steering.tensors(tap)
    return ResidualTap(slots, base, staging, *steers)


def _check_supported(
    vllm_config: "VllmConfig", model: nn.Module, layers: TappedLayers
) -> None:
    parallel = vllm_config.parallel_config
    kind = ", ".join(vllm_config.model_config.architectures or [type(model).__name__])
    reason = None
    if layers.refusals:
        reason = (
            f"the architecture {kind} is refused: {'; '.join(layers.refusals)}. "
            f"Its hook points are: {_described(layers.points)}"
        )
    elif not layers.modules:
        reason = (
            f"the architecture {kind} has no hook points: no stack of decoder layers "
            "was found; `python -m fork models` lists the supported architectures, "
            "and why others are not supported"
        )
    elif vllm_config.model_config.is_encoder_decoder:
        reason = f"{kind} is an encoder-decoder model"
    elif vllm_config.model_config.runner_type != "generate":
        reason = f"the runner is {vllm_config.model_config.runner_type!r}, not generate"
    elif parallel.prefill_context_parallel_size > 1:
        reason = "prefill context parallelism splits a prompt's rows over ranks"
    elif parallel.use_ubatching:
        reason = "dual-batch overlap (--enable-dbo) splits a step's rows"
    if reason is not None:
        steers = vllm_config.steering_config.enabled
        raise ValueError(
            f"capture_consumers={_names(vllm_config)}, enable_steering={steers}: "
            f"this server can neither capture nor steer: {reason}. Start it without "
            "--capture-consumers and --enable-steering"
        )


def _described(points: HookPoints) -> str:
    """List hook points for a message, with equal consecutive layers grouped."""
    runs: list[tuple[int, int, list[str]]] = []
    for layer, names in sorted(points.items()):
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == names:
            runs[-1] = (runs[-1][0], layer, names)
        else:
            runs.append((layer, layer, names))
    parts = [f"{', '.join(names)} in layers {a} to {b}" for a, b, names in runs]
    return "; ".join(parts) or "none"


def _names(vllm_config: "VllmConfig") -> list[str]:
    config = vllm_config.capture_config
    return [entry.instance_name for entry in config.consumers] + config.driver_instances


def v1_view(
    input_batch: "InputBatch",
    num_scheduled: np.ndarray[Any, Any],
    num_rows: int,
    true_starts: torch.Tensor | None = None,
) -> StepView:
    """The view of the V1 runner's batch, after its inputs were prepared.

    Args:
        input_batch: the batch.
        num_scheduled: `[num_reqs]`, tokens of each request.
        num_rows: rows of the step's tensors, padding included.
        true_starts: the true positions, if those of the batch are only assumed.

    """
    num_reqs = len(num_scheduled)
    return StepView(
        req_ids=input_batch.req_ids,
        num_computed=input_batch.num_computed_tokens_cpu[:num_reqs],
        num_scheduled=num_scheduled,
        num_rows=num_rows,
        true_starts=None
        if true_starts is None
        else lambda: true_starts[:num_reqs].clone(),
    )


def v2_view(req_states: "RequestState", batch: "BatchReqState") -> StepView:
    """The view of the V2 runner's batch, after the batch was gathered."""
    num_scheduled = batch.num_scheduled_tokens
    return StepView(
        req_ids=batch.req_ids,
        num_computed=req_states.num_computed_tokens_np[batch.idx_mapping_np],
        num_scheduled=num_scheduled,
        num_rows=batch.num_tokens,
        true_starts=partial(_starts_on_device, req_states, batch)
        if req_states.num_speculative_steps
        else None,
    )


def _starts_on_device(
    req_states: "RequestState", batch: "BatchReqState"
) -> torch.Tensor:
    """The start positions without rejected draft tokens, `[num_reqs]` on the device."""
    known = req_states.num_computed_tokens.gpu
    return known[async_tensor_h2d(batch.idx_mapping_np, device=known.device)]


def first_rows(
    logits: torch.Tensor | None,
    input_batch: "InputBatch",
    scheduler_output: "SchedulerOutput",
) -> torch.Tensor | None:
    """The first row of logits of each request (V1 runner), which is not a draft's."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if logits is None or not drafts:
        return logits
    counts = [1 + len(drafts.get(req_id, ())) for req_id in input_batch.req_ids]
    first = np.cumsum([0, *counts[:-1]])
    return logits[torch.from_numpy(first).to(logits.device)]


def with_readouts(worker: Any, grammar_output: Any) -> Any:
    """Sample tokens with the worker's runner, and attach the readouts of the step."""
    runner = worker.model_runner
    return runner.residual.with_readouts(runner.sample_tokens(grammar_output))


def send_rows(worker: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that a worker sends to the next pipeline stage."""
    found: dict[str, Any] = worker.model_runner.residual.send_rows(tensors)
    return found


def receive_rows(
    worker: Any, tensors: dict[str, Any], wait: Callable[[], None]
) -> None:
    """Take what the previous pipeline stage has added out of its tensors."""
    worker.model_runner.residual.receive_rows(tensors, wait)


def load_module(worker: Any, name: str, path: str, tap: Tap | None) -> None:
    """For `collective_rpc`: load a probe, translator or SAE."""
    _modules_to_change(worker).load(name, path, tap)


def unload_module(worker: Any, name: str) -> None:
    """For `collective_rpc`: unload a probe, translator or SAE."""
    _modules_to_change(worker).unload(name)


def _modules_to_change(worker: Any) -> WorkerModules:
    residual: ResidualStream = worker.model_runner.residual
    if residual.readouts is not None and residual.readouts.recorded is not None:
        residual.readouts.recorded.forget()  # They would keep what is unloaded.
    modules: WorkerModules = worker.model_runner.residual.modules
    return modules


def readout_counters(worker: Any) -> dict[str, dict[str, float]]:
    """For `collective_rpc`: number of rows read out, and seconds it took, by kind."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return {}
    return {
        kind: {"rows": one.rows, "seconds": one.seconds}
        for kind, one in readouts.counters.items()
    }


def decode_rows(worker: Any, rows: bytes, count: int) -> Any:
    """For `collective_rpc`: float32 logits of rows in float32, on the first rank.

    None on ranks that get no logits or have no head.

    Raises:
        ValueError: the model has no head that supports this.

    """
    runner = worker.model_runner
    readouts = runner.residual.readouts
    if readouts is None:
        return None
    if readouts.head.refusal:
        raise ValueError(readouts.head.refusal)
    given = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(count, -1)
    with torch.inference_mode():
        placed = given.to(runner.device, worker.vllm_config.model_config.dtype)
        logits = readouts.head.logits(placed)
    return None if logits is None else logits.float().cpu()


def unembedding_rows(worker: Any, tokens: list[int]) -> Any:
    """For `collective_rpc`: rows of the unembedding, and which are this rank's."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return None
    rows, own = readouts.head.unembedding(tokens)
    return rows.detach().cpu(), own.cpu()


def hook_points_of(worker: Any) -> HookPoints:
    """For `collective_rpc`: the hook points of a worker's layers."""
    points: HookPoints = worker.model_runner.residual.hook_points
    return points


def lens_refusal_of(worker: Any) -> str | None:
    """For `collective_rpc`: why the model has no lens; None on ranks without its head.

    Empty if it has, or nothing is read out.
    """
    readouts = worker.model_runner.residual.readouts
    refusal: str = "" if readouts is None else readouts.head.refusal
    return None if refusal == ELSEWHERE else refusal


def set_hook_points(worker: Any, points: HookPoints) -> None:
    """For `collective_rpc`: set the hook points of all layers, over all stages."""
    worker.vllm_config.capture_config.hook_points = points


def end_captures(worker: Any, ends: Sequence[CaptureEnd]) -> None:
    """For `collective_rpc`: end captures while the engine runs no step."""
    worker.model_runner.residual.end_captures(ends)


def report_captures_to(worker: Any, address: str) -> None:
    """For `collective_rpc`: report counters to the front end at `address`."""
    worker.model_runner.residual.report_captures_to(address)


def before_sleep(worker: Any) -> None:
    """Called before a worker offloads or discards its device memory."""
    worker.model_runner.residual.before_sleep()


def close(worker: Any) -> None:
    """Called when a worker shuts down, possibly before its model was loaded."""
    stream = getattr(getattr(worker, "model_runner", None), "residual", None)
    if stream is not None:
        stream.close()


def stage_steering(worker: Any, tiers: SteeringTiers) -> str | None:
    """For `collective_rpc`: stage new global vectors; returns an error, if any."""
    try:
        worker.model_runner.residual.steering.stage_global(tiers)
    except Exception as error:  # Returned, as other ranks must then drop the change.
        logger.exception("A change of steering failed")
        return f"{type(error).__name__}: {error}"
    return None


def commit_steering(worker: Any, keep: bool) -> None:
    """For `collective_rpc`: apply the staged global vectors, or drop them."""
    worker.model_runner.residual.steering.commit_global(keep)


def dynamic_status(worker: Any) -> dict[str, Any]:
    """For `collective_rpc`: what consumers have set, and how long they take."""
    stream = worker.model_runner.residual
    steering = stream.steering
    told: dict[str, Any] = {
        "tp_rank": get_tensor_model_parallel_rank(),
        "pp_rank": get_pp_group().rank_in_group,
        "steering_initialized": steering is not None,
    }
    if steering is not None and steering.dynamic is not None:
        told |= steering.dynamic.status()
    told["sync_consumers"] = {} if stream.steps is None else dict(stream.steps.status())
    return told


def eager_steps(worker: Any) -> dict[str, int]:
    """For `collective_rpc`: number of steps run eagerly due to steering, by reason."""
    return dict(worker.model_runner.residual.steering.eager_steps)
