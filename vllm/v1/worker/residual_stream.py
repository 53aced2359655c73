# SPDX-License-Identifier: Apache-2.0
"""The runners' access to the residual stream: one attribute, a few calls a step.

A model runner holds one `ResidualStream` and calls it at fixed points of a step:
`update` when the scheduler's output has been applied, `plan_step` when the batch's
order is known, `begin_step` before the forward pass and `end_step` after it. The
views at the end are all that knows how each of the two runners keeps its batch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.model_executor.layers import residual_tap
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.capture.geometry import torch_dtype
from vllm.v1.capture.rows import StepView
from vllm.v1.capture.wire import CaptureEnd
from vllm.v1.capture.worker import Stage, WorkerCapture
from vllm.v1.worker.residual_graphs import family_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

HookPoints = dict[int, list[str]]


class ResidualStream:
    """Nothing is captured: the null object, and what both forms have in common."""

    def __init__(self, hook_points: HookPoints) -> None:
        self.hook_points = hook_points
        """The hook points of this process's layers, by layer index."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Take note of new and ended requests."""

    def plan_step(self, view: StepView) -> bool:
        """Find out what the step does; whether its graphs must have taps."""
        return False

    def choose_family(
        self, descriptor: "BatchExecutionDescriptor"
    ) -> "BatchExecutionDescriptor":
        """The graph to run in place of `descriptor`, which has no taps."""
        return descriptor

    def begin_step(self, num_rows: int) -> None:
        """Write what the pass over `num_rows` rows, padding included, reads."""

    def end_step(self) -> None:
        """The pass is queued on the device."""

    def end_captures(self, ends: Sequence[CaptureEnd]) -> None:
        """Requests that have ended for the client."""

    def close(self) -> None:
        """Flush and release."""


class OpenResidualStream(ResidualStream):
    """The stream of a model whose layers have taps."""

    def __init__(self, hook_points: HookPoints, capture: WorkerCapture) -> None:
        super().__init__(hook_points)
        self._capture = capture

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Take note of new and ended requests."""
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params._capture_plan is not None:
                self._capture.add_request(
                    new.req_id,
                    params._capture_plan,
                    new.prompt_token_ids,
                    params.capture,
                )
        if scheduler_output.capture_ends:
            self.end_captures(scheduler_output.capture_ends)

    def plan_step(self, view: StepView) -> bool:
        """Find the step's captured rows."""
        return self._capture.plan_step(view)

    def choose_family(
        self, descriptor: "BatchExecutionDescriptor"
    ) -> "BatchExecutionDescriptor":
        """The tapped twin, where the step captures and runs a recorded graph."""
        return family_of(descriptor, self._capture.captures)

    def begin_step(self, num_rows: int) -> None:
        """Write the step's slots."""
        self._capture.begin_step(num_rows)

    def end_step(self) -> None:
        """Send the step's rows on their way."""
        self._capture.end_step()

    def end_captures(self, ends: Sequence[CaptureEnd]) -> None:
        """Finish the capture of requests that have ended."""
        for end in ends:
            self._capture.end_request(end)

    def close(self) -> None:
        """Flush what is under way."""
        self._capture.close()


def open_residual_stream(
    vllm_config: "VllmConfig", model: nn.Module, device: torch.device
) -> ResidualStream:
    """Attach taps to a loaded model, before it is compiled and profiled.

    Raises:
        ValueError: capture is configured, but the model or the configuration
            does not allow it; the message says why.

    """
    layers = _tapped_layers(model)
    points = {
        index: list(residual_tap.hook_points(layer)) for index, layer in layers.items()
    }
    config = vllm_config.capture_config
    if not config.enabled:
        return ResidualStream(points)
    _check_supported(vllm_config, model, points)
    stage = Stage(
        get_tensor_model_parallel_rank(),
        get_pp_group().rank_in_group,
        get_pp_group().world_size,
    )
    taps = [(index, point) for index in sorted(points) for point in points[index]]
    width = vllm_config.model_config.get_hidden_size()
    dtype = torch_dtype(vllm_config)
    capture = WorkerCapture(vllm_config, stage, taps, width, dtype, device)
    for index, layer in layers.items():
        residual_tap.attach(
            layer, {point: capture.tap((index, point)) for point in points[index]}
        )
    logger.info(
        "Capture: %d hook points in %d layers, %d rows of %d bytes a step, "
        "consumers %s",
        len(taps),
        len(layers),
        config.rows_per_step(width * dtype.itemsize),
        width * dtype.itemsize,
        [entry.instance_name for entry in config.consumers] + config.driver_instances,
    )
    return OpenResidualStream(points, capture)


def _tapped_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The decoder layers of this process that have hook points, by layer index."""
    decoder = model
    if hasattr(model, "get_language_model"):
        decoder = model.get_language_model()  # type: ignore[operator]
    return {
        extract_layer_index(name): module
        for name, module in decoder.named_modules()
        if residual_tap.hook_points(module)
    }


def _check_supported(
    vllm_config: "VllmConfig", model: nn.Module, points: Mapping[int, Any]
) -> None:
    parallel = vllm_config.parallel_config
    kind = type(model).__name__
    reason = None
    if not points:
        reason = (
            f"the architecture {kind} has no hook points; `python -m fork models` "
            "lists the architectures that have, and why others do not"
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
        raise ValueError(
            f"capture_consumers={_names(vllm_config)}: this server cannot capture: "
            f"{reason}. Start it without --capture-consumers"
        )


def _names(vllm_config: "VllmConfig") -> list[str]:
    config = vllm_config.capture_config
    return [entry.instance_name for entry in config.consumers] + config.driver_instances


def v1_view(
    input_batch: "InputBatch", num_scheduled: np.ndarray[Any, Any], num_rows: int
) -> StepView:
    """The V1 runner's batch, once its inputs are prepared."""
    first_row = np.cumsum(num_scheduled) - num_scheduled
    return StepView(
        req_ids=input_batch.req_ids,
        num_computed=input_batch.num_computed_tokens_cpu[: len(num_scheduled)],
        num_scheduled=num_scheduled,
        first_row=first_row,
        num_rows=num_rows,
    )


def v2_view(req_states: "RequestState", batch: "BatchReqState") -> StepView:
    """The V2 runner's batch, once it is gathered."""
    num_scheduled = batch.num_scheduled_tokens
    first_row = np.cumsum(num_scheduled) - num_scheduled
    return StepView(
        req_ids=batch.req_ids,
        num_computed=req_states.num_computed_tokens_np[batch.idx_mapping_np],
        num_scheduled=num_scheduled,
        first_row=first_row,
        num_rows=batch.num_tokens,
    )


def hook_points_of(worker: Any) -> HookPoints:
    """For `collective_rpc`: the hook points of a worker's layers."""
    points: HookPoints = worker.model_runner.residual.hook_points
    return points


def end_captures(worker: Any, ends: Sequence[CaptureEnd]) -> None:
    """For `collective_rpc`: requests that ended while the engine was idle."""
    worker.model_runner.residual.end_captures(ends)


def close(worker: Any) -> None:
    """A worker shuts down, possibly before its model was loaded."""
    stream = getattr(getattr(worker, "model_runner", None), "residual", None)
    if stream is not None:
        stream.close()
