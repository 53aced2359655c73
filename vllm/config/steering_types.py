# SPDX-License-Identifier: Apache-2.0
"""Types of steering vectors in requests, for clients that are type-checked."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

LayerEntry: TypeAlias = "Sequence[float] | Mapping[str, Any]"
"""A vector, or `{"vector": [...], "scale": s}` and further keys."""

SteeringVectorSpec: TypeAlias = "Mapping[str, Mapping[int | str, LayerEntry]]"
"""`{hook: {layer: entry}}`."""


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


def unpack_steering_vectors(
    spec: "Mapping[str, SteeringHookPacked | Mapping[int | str, LayerEntry]]",
) -> dict[str, dict[int, Any]]:
    """Convert packed vectors to the form `{layer: {"vector", "scale"}}`.

    Args:
        spec: `{hook: {layer: entry}}`, or the packed form for any hook.

    Returns:
        The same vectors, with no hook packed.

    Raises:
        SteeringValidationError: a packed form is inconsistent.

    """
    from vllm.v1.steering.spec.parse import unpacked

    return {hook: unpacked(layers, hook) for hook, layers in spec.items()}
