# SPDX-License-Identifier: Apache-2.0
"""The tensor encoding of vllm-lens over HTTP.

`{"data": base64 of a zstd frame, "dtype", "original_dtype", "shape", "compression"}`;
without `compression` the bytes are uncompressed. bfloat16 is sent as int16.
"""

import base64
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from vllm.interop.tensors import bytes_of, shape_of, tensor_of

MOST_BYTES = 1 << 30
"""Most bytes of one tensor, decompressed."""

DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    }
)


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


def decode(raw: Mapping[str, Any], most_bytes: int = MOST_BYTES) -> torch.Tensor:
    """Decode a tensor from JSON.

    Args:
        raw: the object above.
        most_bytes: a larger tensor is refused before it is decompressed.

    Raises:
        ValueError: the parts do not fit together; the message says how.

    """
    import pyarrow

    name = str(raw.get("original_dtype", raw.get("dtype"))).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        names = sorted(str(one).removeprefix("torch.") for one in DTYPES)
        raise ValueError(f"original_dtype={name[:80]!r}: use one of {names}")
    shape = shape_of(raw.get("shape"))
    size = prod(shape) * dtype.itemsize
    if size > most_bytes:
        raise ValueError(f"a tensor of {size} bytes; at most {most_bytes} are allowed")
    data = bytes_of(raw.get("data")) if size else b""
    compression = raw.get("compression")
    if compression == "zstd" and size:
        try:
            data = pyarrow.decompress(data, size, "zstd", asbytes=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"data is not a zstd frame of {size} bytes") from error
    elif compression not in (None, "zstd"):
        raise ValueError(f"compression={compression!r}: use 'zstd' or leave it out")
    return tensor_of(data, dtype, shape)


def encode_all(activations: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Encode the tensors of `output.activations` as JSON."""
    return {name: encode(tensor) for name, tensor in activations.items()}


def decode_all(response: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Decode the tensors in the field `activations` of a response's JSON, if any.

    Raises:
        ValueError: a tensor's parts do not fit together; the message says how.

    """
    raw = response.get("activations") or {}
    return {name: decode(one) for name, one in raw.items()}
