# SPDX-License-Identifier: Apache-2.0
"""Arrays packed as base64: `{"dtype", "shape", "data"}`, row-major, little-endian."""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.steering.errors import fail

DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}
"""By name: how NumPy reads the bytes, those of bfloat16 as bits."""


def unpack_array(
    packed: Mapping[str, Any], at: str, dimensions: tuple[int, ...] = (1, 2)
) -> npt.NDArray[np.float32]:
    """Unpack an array to float32, in its shape.

    Args:
        packed: an object with the keys `dtype`, `shape` and `data`, perhaps among
            others.
        at: the array's name in messages.
        dimensions: the numbers of dimensions that are allowed.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    dtype, data = packed["dtype"], packed["data"]
    shape = as_list(packed["shape"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(
            f"{at}.dtype: {shown(dtype)} is not one of {list(DTYPES)}",
            f"{at}.dtype",
            dtype,
        )
    if not _is_shape(shape, dimensions):
        forms = {1: "[hidden_size]", 2: "[n, hidden_size]"}
        named = [forms.get(n, "[layers, positions, hidden_size]") for n in dimensions]
        raise fail(
            f"{at}.shape must be {' or '.join(named)}",
            f"{at}.shape",
            shape,
        )
    needed = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    expected = f"shape {list(shape)} in {dtype} takes {needed}"
    if isinstance(data, (str, bytes)) and len(data) > 2 * needed + 4:
        raise fail(
            f"{at}.data holds {len(data)} characters of base64, but {expected} bytes",
            f"{at}.data",
            len(data),
        )
    raw = _decoded(data, at)
    if len(raw) != needed:
        raise fail(
            f"{at}.data holds {len(raw)} bytes, but {expected}", f"{at}.data", len(raw)
        )
    numbers = np.frombuffer(raw, dtype=DTYPES[dtype]).reshape(shape)
    if dtype == "bfloat16":
        return from_bfloat16(numbers)
    with np.errstate(over="ignore"):  # Overflow gives infinity, which is refused later.
        return numbers.astype(np.float32)


def from_bfloat16(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers of bfloat16, given as its bits, which NumPy has no dtype for."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _is_shape(shape: Any, dimensions: tuple[int, ...]) -> bool:
    if not isinstance(shape, (list, tuple)) or len(shape) not in dimensions:
        return False
    return all(is_integer(size, 1, 1 << 31) for size in shape)


def _decoded(data: Any, at: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise fail(
            f"{at}.data is not base64: {error}", f"{at}.data", str(data)[:40]
        ) from None
