# SPDX-License-Identifier: Apache-2.0
"""vllm-lens' steering vector, and its conversion to entries."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    field_serializer,
    field_validator,
    model_validator,
)

from vllm.interop.vllm_lens import tensors

MOST_BYTES = 64 << 20
"""Most bytes of the activations of a request, decompressed."""


class SteeringVector(BaseModel):
    """Vectors that are added to the stream after layers."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    activations: torch.Tensor
    """`[layers, hidden_size]`, or `[layers, positions, hidden_size]`."""
    layer_indices: list[int]
    """The 0-based layer of each index of the first dimension."""
    scale: float = 1.0
    norm_match: bool = False
    """Whether h becomes `h + scale * |h| * v / |v|` instead of `h + scale * v`."""
    position_indices: list[int] | None = None
    """Positions of three-dimensional activations; None for 0 to positions - 1.
    Two-dimensional activations act on every token."""

    @field_validator("activations", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tensors.decode(value, MOST_BYTES)
        if isinstance(value, list):
            try:
                return torch.tensor(value, dtype=torch.float32)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"must be nested lists of numbers: {error}") from error
        return value

    @field_serializer("activations")
    def _encode(self, value: torch.Tensor) -> dict[str, Any]:
        return tensors.encode(value)

    @model_validator(mode="after")
    def _fits(self) -> "SteeringVector":
        shape = tuple(self.activations.shape)
        if len(shape) not in (2, 3):
            raise ValueError(
                f"activations have the shape {shape}; they must be [layers, "
                "hidden_size] or [layers, positions, hidden_size]"
            )
        if len(self.layer_indices) != shape[0]:
            raise ValueError(
                f"layer_indices has {len(self.layer_indices)} layers; activations "
                f"have {shape[0]}"
            )
        positions = self.position_indices
        if len(shape) == 3 and positions is not None and len(positions) != shape[1]:
            raise ValueError(
                f"position_indices has {len(positions)} positions; activations have "
                f"{shape[1]}"
            )
        return self

    @property
    def layer_index_map(self) -> dict[int, int]:
        """The index into the first dimension of `activations`, by layer."""
        return {layer: index for index, layer in enumerate(self.layer_indices)}

    def entries(self) -> list[tuple[int, dict[str, Any]]]:
        """The layers and entries of `steering_vectors` at `post_block`."""
        entries = []
        for layer, rows in zip(self.layer_indices, self.activations.float()):
            entry: dict[str, Any] = {"scale": self.scale, "norm_match": self.norm_match}
            if rows.dim() == 1:
                entry["vector"] = rows
            else:
                given = self.position_indices
                entry["vectors"] = rows
                entry["positions"] = list(range(len(rows))) if given is None else given
            entries.append((layer, entry))
        return entries
