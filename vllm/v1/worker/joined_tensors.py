# SPDX-License-Identifier: Apache-2.0
"""Several tensors as one, for upstream's messages between stages on a CPU.

Such a message holds at most 6 tensors, and the engine stops if it is given more: a step
whose requests read out and steer under conditions has more.
"""

import math
import pickle
from collections.abc import Collection
from typing import Any

import torch

MOST = 6
"""Tensors of a message; upstream adds two that describe them."""
JOINED = "residual_joined"
"""The name of the one tensor."""
_ALIGNMENT = 16
_HEAD = 8
"""Bytes of the size of the description, which comes first."""


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
