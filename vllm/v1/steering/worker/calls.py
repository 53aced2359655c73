# SPDX-License-Identifier: Apache-2.0
"""What the engine core calls in workers for steering, by `collective_rpc`.

Each function gets the worker. They are sent by name, so they stay at module level.
"""

from typing import Any

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.v1.residual.plugin_errors import described
from vllm.v1.steering.plan import SteeringTiers

logger = init_logger(__name__)


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
