# SPDX-License-Identifier: Apache-2.0
"""The heads of a row on which an entry acts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.v1.residual.heads import parse_heads
from vllm.v1.residual.point_shapes import PointShape, shape_of
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel

WIDE = ("vector", "vectors", "plane", "read", "target", "mask", "write")
"""Keys of an entry whose arrays are as wide as the row."""


class Heads:
    """Some heads of the rows of a hook point."""

    def __init__(self, numbers: Sequence[int], shape: PointShape) -> None:
        size = shape.head_size
        self._width = shape.width
        self._places = np.concatenate(
            [np.arange(number * size, (number + 1) * size) for number in numbers]
        )

    @property
    def width(self) -> int:
        """Numbers of these heads together."""
        return len(self._places)

    def cut(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry with vectors of these heads only, where they are whole rows."""
        return {
            key: value[..., self._places]
            if isinstance(value, np.ndarray) and value.shape[-1] == self._width
            else value
            for key, value in entry.items()
        }

    def spread(self, values: Mapping[str, Any], op: str) -> dict[str, Any]:
        """Arrays of the heads as arrays of whole rows, with zeros for the others.

        A direction that is zero outside of the heads changes nothing there, whatever
        the operation, except that `replace` needs a mask.
        """
        made = dict(values)
        if op == "replace" and made.get("mask") is None:
            made["mask"] = np.ones(self.width, np.float32)
        for name in WIDE:
            if made.get(name) is not None:
                made[name] = self._whole(made[name])
        return made

    def _whole(self, part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        whole = np.zeros((*part.shape[:-1], self._width), np.float32)
        whole[..., self._places] = part
        return whole


def heads_of_entry(
    raw: Mapping[str, Any], tap: Tap, model: "SteeredModel", at: str
) -> "tuple[Heads | None, SteeredModel]":
    """The heads of an entry, and the model with the width that its vectors must have.

    Args:
        raw: the entry; without the key `heads` it acts on whole rows.
        tap: where it acts.
        model: the model.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: rows have no such heads, or the operation needs more.

    """
    shape = shape_of(model.shapes, tap, model.hidden_size)
    if raw.get("heads") is None:
        if shape.width == model.hidden_size:
            return None, model
        return None, replace(model, hidden_size=shape.width)
    where = f"{at}.heads"
    numbers = parse_heads(raw["heads"], tap, shape, where, fail)
    if raw.get("norm_match"):
        raise fail(
            f"{where}: norm_match scales by the norm of the whole row; leave one of "
            "the two out",
            where,
            numbers,
        )
    heads = Heads(numbers, shape)
    return heads, replace(model, hidden_size=heads.width)
