# SPDX-License-Identifier: Apache-2.0
"""What workers call; each function gets the worker."""

import math
import pickle
from collections.abc import Callable, Collection
from typing import Any

import torch

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.readouts.worker.stages import UNSLICED as UNSLICED_READOUTS
from vllm.v1.worker.step_consumers import ACTIONS
from vllm.v1.worker.step_faults import FAILED

MOST = 6
"""Tensors of a message between stages on a CPU; upstream adds two that describe them.

The engine stops if it is given more, which a step has whose requests read out and steer
under conditions.
"""
JOINED = "residual_joined"
"""The name of the one tensor that several are joined to."""
_ALIGNMENT = 16
_HEAD = 8
"""Bytes of the size of the description, which comes first."""

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


def join(tensors: dict[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Put all tensors except those of `keep` into one; all are on the CPU."""
    others = {name: one for name, one in tensors.items() if name not in keep}
    facts = [(name, one.dtype, tuple(one.shape)) for name, one in others.items()]
    described = pickle.dumps(facts)
    parts = [_bytes(len(described).to_bytes(_HEAD, "little") + described)]
    parts += [one.contiguous().flatten().view(torch.uint8) for one in others.values()]
    padded = [torch.nn.functional.pad(p, (0, -len(p) % _ALIGNMENT)) for p in parts]
    return {name: tensors[name] for name in keep} | {JOINED: torch.cat(padded)}


def part(tensors: dict[str, Any]) -> None:
    """Undo `join` in place, if it was done."""
    joined = tensors.pop(JOINED, None)
    if joined is None:
        return
    size = int.from_bytes(joined[:_HEAD].numpy().tobytes(), "little")
    first = _HEAD + size
    for name, dtype, shape in pickle.loads(joined[_HEAD:first].numpy().tobytes()):
        first += -first % _ALIGNMENT
        length = math.prod(shape) * dtype.itemsize
        tensors[name] = joined[first : first + length].view(dtype).view(shape)
        first += length


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
