# SPDX-License-Identifier: Apache-2.0
"""What workers call; each function gets the worker."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.readouts.worker.stages import UNSLICED as UNSLICED_READOUTS
from vllm.v1.worker.joined_tensors import JOINED, MOST, join, part
from vllm.v1.worker.step_consumers import ACTIONS
from vllm.v1.worker.step_faults import FAILED

UNSLICED = UNSLICED_READOUTS | {ACTIONS: False, FAILED: False, JOINED: False}
"""Intermediate tensors that are sent as they are; see `readouts.worker.stages`."""


def with_readouts(worker: Any, grammar_output: Any) -> Any:
    """Sample tokens with the worker's runner, and attach the readouts of the step."""
    runner = worker.model_runner
    return runner.residual.with_readouts(runner.sample_tokens(grammar_output))


def send_rows(worker: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that a worker sends to the next pipeline stage."""
    own = tuple(tensors)
    found: dict[str, Any] = worker.model_runner.residual.send_rows(tensors)
    if len(found) > MOST and get_pp_group().use_cpu_custom_send_recv:
        return join(found, own)
    return found


def receive_rows(
    worker: Any, tensors: dict[str, Any], wait: Callable[[], None]
) -> None:
    """Take what the previous pipeline stage has added out of its tensors."""
    part(tensors)
    worker.model_runner.residual.receive_rows(tensors, wait)


def before_sleep(worker: Any) -> None:
    """Called before a worker offloads or discards its device memory."""
    worker.model_runner.residual.before_sleep()


def close(worker: Any) -> None:
    """Called when a worker shuts down, possibly before its model was loaded."""
    stream = getattr(getattr(worker, "model_runner", None), "residual", None)
    if stream is not None:
        stream.close()
