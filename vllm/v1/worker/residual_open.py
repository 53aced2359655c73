# SPDX-License-Identifier: Apache-2.0
"""Attaches taps to a loaded model, and opens what its runner calls in each step."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.residual import tap as residual_tap
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.inductor_guard import guard_calls, guard_copies
from vllm.model_executor.layers.residual.tap import ResidualTap
from vllm.v1.capture.worker.worker import Stage, WorkerCapture
from vllm.v1.hooks.worker.worker import WorkerHooks
from vllm.v1.readouts.worker.head import final_norm_of
from vllm.v1.readouts.worker.head_parts import HeadParts
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.worker import WorkerReadouts
from vllm.v1.residual.kept_memory import kept_memory
from vllm.v1.residual.sizes import num_layers, torch_dtype
from vllm.v1.residual.tap import (
    AFTER,
    HOOK_NAMES,
    OPTIONAL_POINTS,
    READ_ONLY,
    Tap,
    behind,
)
from vllm.v1.steering.worker.doses import Route
from vllm.v1.steering.worker.worker import WorkerSteering
from vllm.v1.worker.inner_points import (
    find_inner_points,
    norms_with_logits,
    projected_heads,
    shapes_of,
    why_missing,
)
from vllm.v1.worker.residual_graph_choice import GraphFamilies
from vllm.v1.worker.residual_graphs import NOTHING, can_record, families_at_start
from vllm.v1.worker.residual_nodes import check_nodes
from vllm.v1.worker.residual_stream import (
    HookPoints,
    OpenResidualStream,
    ResidualStream,
)
from vllm.v1.worker.step_consumers import StepConsumers
from vllm.v1.worker.tapped_layers import LEAVING, TappedLayers, find_tapped_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


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
            the configuration, or the engine's nodes differ; the message says why.

    """
    check_nodes(vllm_config)
    with kept_memory(vllm_config.model_config):
        return _open(vllm_config, model, device)


def _open(
    vllm_config: "VllmConfig", model: nn.Module, device: torch.device
) -> ResidualStream:
    config = vllm_config.capture_config
    enabled = config.enabled or vllm_config.steering_config.enabled
    count = num_layers(vllm_config.model_config)
    optional = config.optional_points
    layers = find_tapped_layers(model, optional, count, weaves=enabled)
    if not enabled:
        Launch.begin(NOTHING, (NOTHING,))
        return ResidualStream(layers.points)
    _check_supported(vllm_config, model, layers)
    width = vllm_config.model_config.get_hidden_size()
    ends = (layers.modules.get((count - 1, point)) for point in LEAVING)
    last = next((module for module, _ in filter(None, ends)), None)
    layers = replace(
        layers,
        inner=find_inner_points(
            layers.blocks,
            optional,
            width,
            vllm_config.parallel_config.tensor_parallel_size,
            None
            if last is None or norms_with_logits(model)
            else final_norm_of(model, last),
        ),
    )
    points = layers.points
    missing = _missing(
        optional, layers, vllm_config.parallel_config.tensor_parallel_size
    )
    shapes = shapes_of(layers.inner, layers.streams, width)
    stage = Stage(
        get_tensor_model_parallel_rank(),
        get_pp_group().rank_in_group,
        get_pp_group().world_size,
    )
    taps = [(index, point) for index in sorted(points) for point in points[index]]
    dtype = torch_dtype(vllm_config.model_config)
    capture = steering = None
    taps_behind: dict[Tap, Tap] = {}
    # Loaded before memory is profiled, so that they count as part of the model.
    modules = WorkerModules(vllm_config.readout_config, device, dtype)
    if config.enabled:
        readouts = None
        if config.readouts:
            readouts = WorkerReadouts(
                vllm_config,
                modules,
                model,
                last,
                device,
                {
                    layer: point.module
                    for (layer, name), point in layers.inner.items()
                    if name == "q"
                },
                HeadParts(projected_heads(layers.inner, layers.blocks, width)),
            )
        taps_behind = _taps_behind(taps, count - 1, AFTER in optional)
        capture = WorkerCapture(
            vllm_config,
            stage,
            [*taps, *taps_behind.values()],
            width,
            dtype,
            device,
            readouts,
            shapes,
        )
    if vllm_config.steering_config.enabled:
        steering = WorkerSteering(
            vllm_config,
            taps,
            width,
            dtype,
            device,
            modules.sae,
            _route_of_doses(stage),
            shapes,
        )
    made = {tap: _tap(tap, taps_behind.get(tap), capture, steering) for tap in taps}
    for place, (module, run) in layers.modules.items():
        residual_tap.attach(module, place[1], made[place], run)
    for place, point in layers.inner.items():
        point.attach(made[place])
    logger.info(
        "Residual stream: %d hook points in %d layers; %s; %s",
        len(taps),
        len(points),
        "no capture" if capture is None else capture.summary(),
        "no steering" if steering is None else steering.summary(),
    )
    guard_calls()
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
        layers.points,
        capture,
        steering,
        graphs,
        _hooks(vllm_config, model, steering),
    )
    stream.modules, stream.point_shapes, stream.missing = modules, shapes, missing
    if config.takes_actions:
        stream.steps = StepConsumers(vllm_config, steering, device, dtype)
        if stream.readouts is not None:
            stream.readouts.on_rows = stream.steps.on_rows
    return stream


def _hooks(
    vllm_config: "VllmConfig", model: nn.Module, steering: WorkerSteering | None
) -> WorkerHooks | None:
    """What runs hook functions; None if requests cannot have any."""
    if steering is None or not vllm_config.steering_config.hooks:
        return None
    reports = get_tensor_model_parallel_rank() == 0
    return WorkerHooks(model, steering.program_addresses, reports)


def _missing(
    optional: Collection[str], layers: TappedLayers, tensor_parallel: int
) -> dict[str, str]:
    """The hook points that no layer here has, with the reasons; logs enabled ones.

    Points of the stream, and of several streams, need not be enabled.
    """
    having = {name for names in layers.points.values() for name in names}
    wanted = [
        one for one in HOOK_NAMES if one in optional or one not in OPTIONAL_POINTS
    ]
    names = [name for name in wanted if name not in having]
    missing = why_missing(layers.blocks, names, tensor_parallel)
    for name, why in missing.items():
        if name in optional:
            logger.warning("No layer of this process has the point %s: %s", name, why)
    return missing


def _route_of_doses(stage: Stage) -> Route:
    if stage.pipeline_rank < stage.pipeline_size - 1:
        return Route.NEXT_STAGE
    return Route.OUTPUT if stage.tensor_rank == 0 else Route.NOWHERE


def _tap(
    tap: Tap,
    after: Tap | None,
    capture: WorkerCapture | None,
    steering: WorkerSteering | None,
) -> ResidualTap:
    """Create a tap with the tensors that its ops read and write."""
    slots = base = staging = None
    if capture is not None:
        slots, base, staging = capture.tensors(tap)
    steers: tuple[torch.Tensor | None, ...] = ()
    if steering is not None and tap[1] not in READ_ONLY:
        steers = steering.tensors(tap)
    made = ResidualTap(slots, base, staging, *steers)
    if capture is not None and after is not None:
        made.after, *_ = capture.tensors(after)
    return made


def _taps_behind(
    taps: Collection[Tap], last_layer: int, enabled: bool
) -> dict[Tap, Tap]:
    """Where rows are read behind interventions, if not where the next block begins.

    The last block has such a place always: a lens there sees what was changed.
    """
    found = {tap: behind(tap, last_layer) for tap in taps}
    return {
        tap: after
        for tap, after in found.items()
        if after[0] == tap[0] and (enabled or tap == (last_layer, "post_block"))
    }


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
    elif vllm_config.model_config.runner_type != "generate":
        reason = f"the runner is {vllm_config.model_config.runner_type!r}, not generate"
    elif vllm_config.cache_config.kv_sharing_fast_prefill:
        reason = "--kv-sharing-fast-prefill skips most prompt tokens in some layers"
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
