# SPDX-License-Identifier: Apache-2.0
"""What workers call; each function gets the worker."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from vllm.distributed.parallel_state import get_pp_group
from vllm.utils.math_utils import round_up
from vllm.v1.readouts.worker.stages import UNSLICED as UNSLICED_READOUTS
from vllm.v1.residual.plain_tensors import (
    ALIGNMENT,
    forms_of,
    joined,
    packed,
    parted,
    unpacked,
)
from vllm.v1.worker.step_additions import NOTES

MOST = 6
"""Tensors of a message between stages on a CPU; upstream adds two that describe them.

The engine stops if it is given more, which a step has whose requests read out and steer
under conditions.
"""
JOINED = "residual_joined"
"""The name of the one tensor that several are joined to."""

UNSLICED = UNSLICED_READOUTS | {NOTES: False, JOINED: False}
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


def join(tensors: dict[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Put all tensors except those of `keep` into one; all are on the CPU."""
    others = {name: one for name, one in tensors.items() if name not in keep}
    described = packed((list(others), forms_of(others.values())))
    size = torch.tensor([len(described)])
    kept = {name: tensors[name] for name in keep}
    return kept | {JOINED: joined([size, described, *others.values()])}


def part(tensors: dict[str, Any]) -> None:
    """Undo `join` in place, if it was done."""
    data = tensors.pop(JOINED, None)
    if data is None:
        return
    (size,) = next(parted(data, [(torch.int64, (1,))])).tolist()
    first = ALIGNMENT + round_up(size, ALIGNMENT)
    names, forms = unpacked(data[ALIGNMENT : ALIGNMENT + size])
    tensors.update(zip(names, parted(data[first:], forms), strict=True))
