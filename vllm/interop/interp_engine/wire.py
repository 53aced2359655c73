# SPDX-License-Identifier: Apache-2.0
"""The tensor encoding of interp-engine: `{"dtype", "shape", "data"}`.

`data` is base64 of the row-major, little-endian bytes.
"""

import base64
import binascii
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from vllm.v1.residual.bounds import shown

DTYPES = ("float32", "float16", "bfloat16")
MOST_DIMENSIONS = 8


def encode_tensor(tensor: torch.Tensor, dtype: str = "float32") -> dict[str, Any]:
    """Convert a tensor to `dtype` and encode it as JSON.

    Raises:
        ValueError: the dtype is unknown.

    """
    plain = tensor.detach().to("cpu", _dtype(dtype)).contiguous()
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    encoded = base64.b64encode(data).decode()
    return {"dtype": dtype, "shape": list(plain.shape), "data": encoded}


def decode_tensor(value: Any) -> torch.Tensor:
    """Decode a float32 tensor from JSON: an object as above, or nested lists.

    Raises:
        ValueError: the parts do not fit together; the message says how.

    """
    if torch.is_tensor(value):
        tensor: torch.Tensor = value
        return tensor.detach().float().cpu()
    if not isinstance(value, Mapping):
        try:
            return torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a tensor must be lists of numbers: {error}") from error
    if unknown := sorted(value.keys() - {"dtype", "shape", "data"}):
        raise ValueError(f"a tensor has no field {shown(unknown[0])}")
    dtype, shape = _dtype(value.get("dtype")), value.get("shape")
    if (
        not isinstance(shape, list)
        or not 0 < len(shape) <= MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 1 << 31 for n in shape)
    ):
        raise ValueError(
            f"shape must be a list of 1 to {MOST_DIMENSIONS} integers of at least 0"
        )
    try:
        data = base64.b64decode(value.get("data") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError("data must be base64") from error
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(
            f"data has {len(data)} bytes; shape and dtype need "
            f"{prod(shape) * dtype.itemsize}"
        )
    if not data:
        return torch.empty(shape)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).float()


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype={shown(name)}: use one of {list(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
