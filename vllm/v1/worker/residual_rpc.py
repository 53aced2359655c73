# SPDX-License-Identifier: Apache-2.0
"""What workers call, and what the engine core calls in them by `collective_rpc`.

Each function gets the worker. A function that the engine core calls is sent by name, so
it stays at module level.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.v1.readouts.worker.head import ELSEWHERE
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.stages import UNSLICED as UNSLICED_READOUTS
from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import SteeringTiers
from vllm.v1.worker.residual_stream import HookPoints, ResidualStream
from vllm.v1.worker.step_consumers import ACTIONS

logger = init_logger(__name__)

UNSLICED = UNSLICED_READOUTS | {ACTIONS: False}
"""Intermediate tensors that are sent as they are; see `readouts.worker.stages`."""


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
        return described(error)
    return None


def commit_steering(worker: Any, keep: bool) -> None:
    """For `collective_rpc`: apply the staged global vectors, or drop them."""
    worker.model_runner.residual.steering.commit_global(keep)


def dynamic_status(worker: Any) -> dict[str, Any]:
    """For `collective_rpc`: what consumers have set, and how long they take."""
    stream = worker.model_runner.residual
    steering = stream.steering
    status: dict[str, Any] = {
        "tp_rank": get_tensor_model_parallel_rank(),
        "pp_rank": get_pp_group().rank_in_group,
        "steering_initialized": steering is not None,
    }
    if steering is not None and steering.dynamic is not None:
        status |= steering.dynamic.status()
    consumers = {} if stream.steps is None else stream.steps.status()
    status["sync_consumers"] = dict(consumers)
    return status


def eager_steps(worker: Any) -> dict[str, int]:
    """For `collective_rpc`: number of steps run eagerly due to steering, by reason."""
    return dict(worker.model_runner.residual.steering.eager_steps)
