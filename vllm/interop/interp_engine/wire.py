# SPDX-License-Identifier: Apache-2.0
"""The tensor encoding of interp-engine: `{"dtype", "shape", "data"}`.

`data` is base64 of the row-major, little-endian bytes.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer

DTYPES = ("float32", "float16", "bfloat16")
MOST_DIMENSIONS = 8


PIECE_BYTES = 3 << 18
"""Bytes that are encoded at a time; a multiple of 3, so that pieces join."""


def encoded_pieces(value: Any, dtype: str) -> Iterator[bytes]:
    """JSON of dicts and lists with tensors, which are converted to `dtype`, in pieces.

    Encoding many megabytes in one call would hold the interpreter's lock.

    Raises:
        ValueError: the dtype is unknown.

    """
    if torch.is_tensor(value):
        plain = value.detach().to("cpu", _dtype(dtype)).contiguous()
        yield f'{{"dtype": "{dtype}", "shape": {list(plain.shape)}, "data": "'.encode()
        data = memoryview(b"")
        if plain.numel():
            data = plain.flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            yield base64.b64encode(data[start : start + PIECE_BYTES])
        yield b'"}'
    elif isinstance(value, Mapping):
        for number, (key, one) in enumerate(value.items()):
            yield (", " if number else "{").encode() + json.dumps(key).encode() + b": "
            yield from encoded_pieces(one, dtype)
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield b", " if number else b"["
            yield from encoded_pieces(one, dtype)
        yield b"]" if value else b"[]"
    else:
        yield json.dumps(value).encode()


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
        or not all(is_integer(size, 0, 1 << 31) for size in shape)
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
