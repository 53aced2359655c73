# SPDX-License-Identifier: Apache-2.0
"""Steering vectors in requests: types, and what plug-ins compute of them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

LayerEntry: TypeAlias = "Sequence[float] | Mapping[str, Any]"
"""A vector, or `{"vector": [...], "scale": s}` and further keys."""

SteeringVectorSpec: TypeAlias = "Mapping[str, Mapping[int | str, LayerEntry]]"
"""`{hook: {layer: entry}}`."""

Arrays: TypeAlias = dict[str, dict[int, npt.NDArray[np.float64]]]
"""`{hook: {layer: vector [hidden_size]}}`."""

SteeringClamps: TypeAlias = (
    "Mapping[str, Mapping[int | str, Sequence[Mapping[str, Any]]]]"
)
"""`{hook: {layer: [{"vector", "min" and "max" or "value", "strength"}]}}`."""


class SteeringHookPacked(TypedDict):
    """Vectors of several layers at one hook point, as bytes."""

    dtype: str
    """float16, float32, float64 or bfloat16."""
    shape: list[int]
    """`[n, hidden_size]`."""
    layer_indices: list[int]
    data: str
    """base64 of the rows, little-endian."""
    scales: NotRequired[list[float]]


def normalize_layer_entry(entry: Any) -> tuple[Any, float]:
    """The vector of an entry as it was given, and its scale.

    Raises:
        ValueError: an object has other keys than `vector` and `scale`.

    """
    if not isinstance(entry, Mapping):
        return entry, 1.0
    if "vector" not in entry or entry.keys() - {"vector", "scale"}:
        raise ValueError(
            "an entry is a vector, or an object with vector and scale; it has the keys "
            f"{sorted(map(str, entry))}"
        )
    return entry["vector"], float(entry.get("scale", 1.0))


def unpack_steering_vectors(
    spec: "Mapping[str, SteeringHookPacked | Mapping[int | str, LayerEntry]] | None",
) -> Arrays:
    """The vectors of a specification, packed or not, with their scales applied.

    Args:
        spec: `{hook: {layer: entry}}`, or the packed form for any hook.

    Returns:
        float64 arrays `[hidden_size]`, by hook point and layer.

    Raises:
        ValueError: a packed form is inconsistent, or an entry is not a vector.

    """
    from vllm.v1.steering.spec.parse import unpacked

    arrays: Arrays = {}
    for hook, layers in (spec or {}).items():
        for layer, entry in unpacked(layers, hook).items():
            vector, scale = normalize_layer_entry(entry)
            scaled = np.asarray(vector, dtype=np.float64) * scale
            arrays.setdefault(hook, {})[layer] = scaled
    return arrays


def merge_steering_specs(a: Any, b: Any) -> Arrays | None:
    """The sum of two specifications, by hook point and layer; None if both are empty.

    Raises:
        ValueError: one of them is invalid, or vectors differ in length.

    """
    sums = unpack_steering_vectors(a)
    for hook, layers in unpack_steering_vectors(b).items():
        at = sums.setdefault(hook, {})
        for layer, vector in layers.items():
            if layer in at and at[layer].shape != vector.shape:
                raise ValueError(
                    f"{hook}, layer {layer}: vectors of different lengths, "
                    f"{len(at[layer])} and {len(vector)}"
                )
            at[layer] = at[layer] + vector if layer in at else vector
    return sums or None


resolve_effective_vectors = merge_steering_specs
"""The vectors of a phase: those for all tokens, and those for its own."""


def scale_steering_spec(spec: Any, scale: float) -> "SteeringVectorSpec | None":
    """A specification with each entry's scale multiplied; None if it is empty."""
    if not spec:
        return None
    return {
        hook: {
            layer: {"vector": vector, "scale": own * scale}
            for layer, (vector, own) in (
                (layer, normalize_layer_entry(entry)) for layer, entry in layers.items()
            )
        }
        for hook, layers in spec.items()
    }


def hash_steering_config(
    effective_vectors: Any, module_ref: tuple[str, float] | None = None
) -> int:
    """A number that is equal for equal vectors, as float32; 0 if there are none.

    Args:
        effective_vectors: a specification; scales count.
        module_ref: name and scale of a registered set, which the number then depends
            on too.

    """
    vectors = unpack_steering_vectors(effective_vectors)
    if not vectors and module_ref is None:
        return 0
    digest = hashlib.sha256(repr(module_ref).encode())
    for hook, layers in sorted(vectors.items()):
        for layer, vector in sorted(layers.items()):
            digest.update(f"{hook} {layer} {len(vector)} ".encode())
            digest.update(vector.astype("<f4").tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
