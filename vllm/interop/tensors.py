# SPDX-License-Identifier: Apache-2.0
"""Tensors in the messages of other libraries: a dtype, a shape and base64."""

import base64
import binascii
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from vllm.v1.residual.numbers import is_integer

MOST_DIMENSIONS = 8


def shape_of(raw: Any, least: int = 0) -> list[int]:
    """A shape of at least so many dimensions, whose sizes fit into 32 bits.

    Raises:
        ValueError: it is none.

    """
    if (
        not isinstance(raw, list)
        or not least <= len(raw) <= MOST_DIMENSIONS
        or not all(is_integer(size, 0, 1 << 31) for size in raw)
    ):
        raise ValueError(
            f"shape must be a list of {least} to {MOST_DIMENSIONS} integers of at "
            "least 0"
        )
    return raw


def bytes_of(raw: Any) -> bytes:
    """The bytes in base64.

    Raises:
        ValueError: it is no base64.

    """
    try:
        return base64.b64decode(raw or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError("data must be base64") from error


def tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of row-major, little-endian bytes.

    Raises:
        ValueError: there are more or fewer bytes.

    """
    size = prod(shape) * dtype.itemsize
    if len(data) != size:
        raise ValueError(f"data has {len(data)} bytes; shape and dtype need {size}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
