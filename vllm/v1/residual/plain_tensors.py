# SPDX-License-Identifier: Apache-2.0
"""Objects that travel between pipeline stages among a step's intermediate tensors."""

import pickle
from typing import Any

import torch


def packed(value: Any) -> torch.Tensor:
    """A value as pickled bytes `[n]` uint8 on the host."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(tensor: torch.Tensor) -> Any:
    """The value of a tensor from `packed`, sent by another rank of this engine."""
    return pickle.loads(tensor.numpy().tobytes())
