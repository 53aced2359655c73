# SPDX-License-Identifier: Apache-2.0
"""The tensor encoding of vllm-lens over HTTP.

`{"data": base64 of a zstd frame, "dtype", "original_dtype", "shape", "compression"}`;
without `compression` the bytes are uncompressed. bfloat16 is sent as int16.
"""

import base64
import binascii
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

MOST_BYTES = 1 << 30
"""Most bytes of one tensor, decompressed."""


def encode(tensor: torch.Tensor) -> dict[str, Any]:
    """Encode a tensor as JSON."""
    import pyarrow

    plain = tensor.detach().cpu().contiguous()
    sent = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
    codec = pyarrow.Codec("zstd", compression_level=1)
    data = codec.compress(sent.numpy().tobytes(), asbytes=True)
    return {
        "data": base64.b64encode(data).decode(),
        "dtype": str(sent.dtype).removeprefix("torch."),
        "original_dtype": str(plain.dtype),
        "shape": list(plain.shape),
        "compression": "zstd",
    }


def decode(raw: Mapping[str, Any]) -> torch.Tensor:
    """Decode a tensor from JSON.

    Raises:
        ValueError: the parts do not fit together; the message says how.

    """
    import pyarrow

    name = str(raw.get("original_dtype", raw.get("dtype"))).removeprefix("torch.")
    dtype, shape = getattr(torch, name, None), raw.get("shape")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"original_dtype={name!r}: torch has no such dtype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("shape must be a list of integers of at least 0")
    size = prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise ValueError(f"a tensor of {size} bytes; at most {MOST_BYTES} are allowed")
    if not size:
        return torch.empty(shape, dtype=dtype)
    try:
        data = base64.b64decode(raw.get("data") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError("data must be base64") from error
    compression = raw.get("compression")
    if compression == "zstd":
        try:
            data = pyarrow.decompress(data, size, "zstd", asbytes=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"data is not a zstd frame of {size} bytes") from error
    elif compression is not None:
        raise ValueError(f"compression={compression!r}: use 'zstd' or leave it out")
    if len(data) != size:
        raise ValueError(f"data has {len(data)} bytes; shape and dtype need {size}")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
