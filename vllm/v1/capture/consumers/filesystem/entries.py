# SPDX-License-Identifier: Apache-2.0
"""Captured rows as NumPy arrays, with the API of an earlier public fork."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.residual.tap import Tap

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class CaptureEntry:
    """The rows of one key."""

    layer: int
    hook: str
    array: Array
    """`[rows, hidden_size]`; bfloat16, which NumPy lacks, as `uint16` bits."""
    dtype: str
    """The dtype of the stream, such as `bfloat16`."""


class PerFile(NamedTuple):
    """The rows and the sidecar of one key's file, with the fields of `CaptureEntry`."""

    rows: torch.Tensor
    """`[rows, hidden_size]` in the stream's dtype."""
    sidecar: dict[str, Any]

    @property
    def layer(self) -> int:
        """0-based index of the block."""
        return int(self.sidecar["layer"])

    @property
    def hook(self) -> str:
        """The hook point."""
        return str(self.sidecar["hook"])

    @property
    def array(self) -> Array:
        """The rows as in `CaptureEntry.array`."""
        return as_array(self.rows)

    @property
    def dtype(self) -> str:
        """The dtype as in `CaptureEntry.dtype`."""
        return name_of(self.rows.dtype)


def as_array(rows: torch.Tensor) -> Array:
    """The rows as a NumPy array; bfloat16 as `uint16` bits."""
    if rows.dtype is torch.bfloat16:
        return rows.contiguous().view(torch.int16).numpy().view(np.uint16)
    return rows.numpy()


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def entries_of(rows: dict[Tap, torch.Tensor]) -> dict[Tap, CaptureEntry]:
    """Convert tensors to entries, by `(layer, hook)`."""
    return {
        (layer, hook): CaptureEntry(layer, hook, as_array(one), name_of(one.dtype))
        for (layer, hook), one in rows.items()
    }
