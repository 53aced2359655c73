# SPDX-License-Identifier: Apache-2.0
"""The tensor encoding of interp-engine: `{"dtype", "shape", "data"}`.

`data` is base64 of the row-major, little-endian bytes.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm.interop.tensors import bytes_of, shape_of, tensor_of
from vllm.v1.residual.bounds import shown

DTYPES = ("float32", "float16", "bfloat16")

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
    dtype, shape = _dtype(value.get("dtype")), shape_of(value.get("shape"), least=1)
    return tensor_of(bytes_of(value.get("data")), dtype, shape).float()


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype={shown(name)}: use one of {list(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
