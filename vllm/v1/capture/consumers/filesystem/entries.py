# SPDX-License-Identifier: Apache-2.0
"""Captured rows as numpy arrays, in the form of an earlier public fork."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.capture.plan import Tap

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class CaptureEntry:
    """The rows of one key."""

    layer: int
    hook: str
    array: Array
    """`[rows, hidden_size]`; bfloat16, which numpy does not have, as its 16 bits."""
    dtype: str
    """The stream's, such as `bfloat16`."""


class PerFile(NamedTuple):
    """The rows of a file of one key: a pair with the parts of a `CaptureEntry`."""

    rows: torch.Tensor
    """`[rows, hidden_size]` in the stream's dtype."""
    sidecar: dict[str, Any]

    @property
    def layer(self) -> int:
        """The layer."""
        return int(self.sidecar["layer"])

    @property
    def hook(self) -> str:
        """The hook point."""
        return str(self.sidecar["hook"])

    @property
    def array(self) -> Array:
        """As `CaptureEntry.array`."""
        return as_array(self.rows)

    @property
    def dtype(self) -> str:
        """As `CaptureEntry.dtype`."""
        return name_of(self.rows.dtype)


def as_array(rows: torch.Tensor) -> Array:
    """The rows in numpy; bfloat16 as its 16 bits."""
    if rows.dtype is torch.bfloat16:
        return rows.contiguous().view(torch.int16).numpy().view(np.uint16)
    return rows.numpy()


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def entries_of(rows: dict[Tap, torch.Tensor]) -> dict[Tap, CaptureEntry]:
    """The entries of some rows, by `(layer, hook)`."""
    return {
        (layer, hook): CaptureEntry(layer, hook, as_array(one), name_of(one.dtype))
        for (layer, hook), one in rows.items()
    }
