# SPDX-License-Identifier: Apache-2.0
"""Objects that travel between pipeline stages among a step's intermediate tensors.

Upstream sends only tensors, and between processes on CPUs few of them.
"""

import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

ALIGNMENT = 16
"""Bytes at whose multiples tensors start in one that they are joined to."""

Forms: TypeAlias = Sequence[tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes."""


def packed(value: Any) -> torch.Tensor:
    """A value as pickled bytes `[n]` uint8 on the host."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(tensor: torch.Tensor) -> Any:
    """The value of a tensor from `packed`, sent by another rank of this engine."""
    return pickle.loads(tensor.numpy().tobytes())


def forms_of(tensors: Iterable[torch.Tensor]) -> Forms:
    """What `parted` must know of joined tensors."""
    return [(one.dtype, tuple(one.shape)) for one in tensors]


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors as one, `[n]` uint8 on their device."""
    flat = [one.contiguous().flatten().view(torch.uint8) for one in tensors]
    padded = [torch.nn.functional.pad(one, (0, -len(one) % ALIGNMENT)) for one in flat]
    return torch.cat(padded)


def parted(data: torch.Tensor, forms: Forms) -> Iterator[torch.Tensor]:
    """The tensors that were joined, as views."""
    first = 0
    for dtype, shape in forms:
        size = math.prod(shape) * dtype.itemsize
        yield data[first : first + size].view(dtype).view(shape)
        first += size + -size % ALIGNMENT
