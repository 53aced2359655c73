# SPDX-License-Identifier: Apache-2.0
"""Decodes payloads of the consumer `inline` to numpy arrays."""

import base64
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from clearbox_client.errors import InputError
from clearbox_client.memory import MEMORY
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {
    "bfloat16": "<u2",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
}


def stored_of(data: bytes | memoryview, dtype: str, shape: Sequence[int]) -> Array:
    """Row-major little-endian bytes as an array; bfloat16 as `uint16` with its bits.

    The array is writable: a view of `data` if that is, otherwise a copy.

    Raises:
        InputError: the dtype is unknown, or the number of bytes does not match the
            shape.

    """
    if dtype not in DTYPES:
        message = f"the dtype {dtype!r} is unknown; update clearbox-client"
        raise InputError(message, "dtype", dtype)
    kind = np.dtype(DTYPES[dtype])
    view = memoryview(data)
    if view.nbytes != prod(shape) * kind.itemsize:
        raise InputError(
            f"{view.nbytes / kind.itemsize:g} values for the shape {list(shape)}; the "
            "payload was cut off or changed in transit; request it again",
            "data",
            view.nbytes,
        )
    flat: Array = np.frombuffer(view, kind)
    return (flat.copy() if view.readonly else flat).reshape(shape)


def widened(stored: Array, dtype: str) -> Array:
    """What `stored_of` returns as numbers: bfloat16 as float32, others as they are.

    bfloat16 is the upper half of a float32, so this is exact.
    """
    if dtype != "bfloat16":
        return stored
    bits = np.frombuffer(MEMORY.take(4 * stored.size), "<u4").reshape(stored.shape)
    np.left_shift(stored, 16, out=bits, dtype=bits.dtype)
    return bits.view("<f4")


def entry_stored(entry: Mapping[str, Any]) -> Array:
    """The rows of one entry, as `stored_of` returns them."""
    given = entry["data"]
    data = base64.b64decode(given) if isinstance(given, str) else given
    return stored_of(data, entry["dtype"], entry["shape"])


def packed_values(packed: Mapping[str, Any]) -> Array:
    """Decode `{"dtype", "shape", "data"}` with base64, the form of rows and vectors."""
    data = base64.b64decode(packed["data"])
    stored = stored_of(data, packed["dtype"], packed["shape"])
    return widened(stored, packed["dtype"])


def decode(payload: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], Array]:
    """Decode a payload to rows `[rows, hidden_size]` by `(layer, hook)`.

    For a request with `n > 1` or several prompts, the payload maps each index to a
    payload of its own; decode these one by one.
    """
    return {
        (one["layer"], one["hook"]): widened(entry_stored(one), one["dtype"])
        for one in payload
    }
