# SPDX-License-Identifier: Apache-2.0
"""Decodes payloads of the consumer `inline` to numpy arrays."""

import base64
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from clearbox_client.errors import InputError
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
}


def values_of(data: bytes | memoryview, dtype: str, shape: Sequence[int]) -> Array:
    """Decode row-major little-endian bytes; bfloat16 becomes float32.

    bfloat16 is the upper half of a float32, so this is exact.

    Raises:
        InputError: the dtype is unknown, or the number of bytes does not match the
            shape.

    """
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        flat: Array = bits.view("<f4")
    elif dtype in DTYPES:
        flat = np.frombuffer(data, DTYPES[dtype]).copy()
    else:
        told = f"the dtype {dtype!r} is unknown; update clearbox-client"
        raise InputError(told, "dtype", dtype)
    if len(flat) != prod(shape):
        raise InputError(
            f"{len(flat)} values for the shape {list(shape)}; the payload was cut off "
            "or changed in transit; request it again",
            "data",
            len(flat),
        )
    return flat.reshape(shape)


def entry_values(entry: Mapping[str, Any]) -> Array:
    """The values `[rows, hidden_size]` of one entry, with base64 or bytes as `data`."""
    given = entry["data"]
    data = base64.b64decode(given) if isinstance(given, str) else given
    encoding = entry.get("encoding")
    if encoding == "zstd":
        data = _unzstd(data)
    elif encoding is not None:
        told = f"the encoding {encoding!r} is unknown; update clearbox-client"
        raise InputError(told, "encoding", encoding)
    return values_of(data, entry["dtype"], entry["shape"])


def packed_values(packed: Mapping[str, Any]) -> Array:
    """Decode `{"dtype", "shape", "data"}` with base64, the form of rows in readouts."""
    data = base64.b64decode(packed["data"])
    return values_of(data, packed["dtype"], packed["shape"])


def decode(payload: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], Array]:
    """Decode a payload to rows `[rows, hidden_size]` by `(layer, hook)`.

    For a request with `n > 1` or several prompts, the payload maps each index to a
    payload of its own; decode these one by one.
    """
    return {(one["layer"], one["hook"]): entry_values(one) for one in payload}


def _unzstd(data: bytes) -> bytes:
    try:
        import zstandard  # type: ignore[import-not-found]
    except ImportError:
        raise InputError(
            "the rows are compressed with zstd; pip install clearbox-client[zstd], or "
            "omit the encoding from the request",
            "encoding",
            "zstd",
        ) from None
    unpacked: bytes = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return unpacked
