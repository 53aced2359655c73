# SPDX-License-Identifier: Apache-2.0
"""Steering vectors in the packed form of requests."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from clearbox_client.errors import InputError
from clearbox_client.payloads import packed_values
from numpy.typing import ArrayLike, NDArray

Vectors = Mapping[str, Mapping[int, ArrayLike]]
"""Hook point -> layer -> vector `[hidden_size]`."""


def pack(
    vectors: Vectors,
    dtype: str = "float32",
    scales: Mapping[int, float] | float | None = None,
) -> dict[str, Any]:
    """Pack vectors for `steering_vectors` and modules, at a third of the size of lists.

    Args:
        vectors: hook point -> layer -> vector.
        dtype: dtype of the packed values: `float32`, `float64`, `float16` or `bfloat16`
            (rounded to the nearest, ties to even).
        scales: factor of each layer's vector, or of all.

    Raises:
        InputError: a vector is not one-dimensional, not finite, or of another width; or
            a scale belongs to none.

    """
    for hook, layers in vectors.items():
        if not isinstance(layers, Mapping):
            raise InputError(
                f"{hook!r} must map layers to vectors: {{'post_block': {{5: v}}}}",
                f"vectors.{hook}",
                type(layers).__name__,
            )
    if isinstance(scales, Mapping):
        known = {layer for layers in vectors.values() for layer in layers}
        if unknown := scales.keys() - known:
            raise InputError(
                f"scales has {sorted(unknown)}, which have no vector; its keys must be "
                f"among the layers {sorted(known)}",
                "scales",
                dict(scales),
            )
    return {
        hook: _packed(hook, layers, dtype, scales) for hook, layers in vectors.items()
    }


def _packed(
    hook: str, layers: Mapping[int, ArrayLike], dtype: str, scales: Any
) -> dict[str, Any]:
    order = sorted(layers)
    rows = [np.asarray(layers[layer], np.float64) for layer in order]
    for layer, row in zip(order, rows):
        if row.ndim != 1 or row.shape != rows[0].shape or not np.isfinite(row).all():
            raise InputError(
                f"{hook}, layer {layer}: a vector of shape {row.shape}, another of "
                f"{rows[0].shape}; all must be finite, one-dimensional and equally "
                "wide",
                f"vectors.{hook}.{layer}",
                row.tolist(),
            )
    packed = {**pack_rows(np.stack(rows), dtype), "layer_indices": order}
    if scales is not None:
        of_all = isinstance(scales, (int, float))
        packed["scales"] = [
            float(scales if of_all else scales.get(i, 1.0)) for i in order
        ]
    return packed


def pack_rows(rows: ArrayLike, dtype: str = "float32") -> dict[str, Any]:
    """Pack rows `[n, width]`, or one, as `{"dtype", "shape", "data"}`.

    This is the form of the field `patch_vectors`.

    Args:
        rows: numbers.
        dtype: of the packed values, as of `pack`.

    Raises:
        InputError: there is no such dtype.

    """
    matrix = np.atleast_2d(np.asarray(rows, np.float64))
    data = base64.b64encode(_bytes(matrix, dtype)).decode()
    return {"dtype": dtype, "shape": list(matrix.shape), "data": data}


def _bytes(matrix: NDArray[np.float64], dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = matrix.astype("<f4").view("<u4")
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        upper: bytes = (rounded >> 16).astype("<u2").tobytes()
        return upper
    kinds = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
    if dtype not in kinds:
        message = f"dtype {dtype!r} must be one of {[*kinds, 'bfloat16']}"
        raise InputError(message, "dtype", dtype)
    return matrix.astype(kinds[dtype]).tobytes()


def unpack(packed: Mapping[str, Any]) -> dict[int, NDArray[Any]]:
    """Unpack one hook point's packed form to scaled vectors by layer."""
    matrix = packed_values(packed)
    scales = packed.get("scales") or [1.0] * len(matrix)
    return {
        int(layer): row * scale
        for layer, row, scale in zip(packed["layer_indices"], matrix, scales)
    }
