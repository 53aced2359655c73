# SPDX-License-Identifier: Apache-2.0
"""How many numbers a row has at each hook point."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from vllm.v1.residual.tap import AFTER, Tap


class PointShape(NamedTuple):
    """The rows of a hook point."""

    width: int
    """Numbers per row."""
    heads: int = 0
    """How many heads the row consists of, one after the other; 0 if it has none."""

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.width // self.heads


Shapes: TypeAlias = Mapping[int, Mapping[str, tuple[int, int]]]
"""By layer and hook point, `PointShape` of the points that have heads or another width
than the stream."""
NO_SHAPES: Shapes = MappingProxyType({})


def shape_of(shapes: Shapes, tap: Tap, hidden_size: int) -> PointShape:
    """The shape of a hook point's rows.

    Args:
        shapes: of the model.
        tap: the hook point.
        hidden_size: the width of the stream, which all other points have.

    """
    layer, hook = tap[0], tap[1].removesuffix(f".{AFTER}")
    return PointShape(*shapes.get(layer, {}).get(hook, (hidden_size, 0)))


def width_at(
    shapes: Shapes, hidden_size: int, tap: Tap, heads: Sequence[int] = ()
) -> int:
    """Numbers per row at a hook point, or per part of it that is of some heads."""
    shape = shape_of(shapes, tap, hidden_size)
    return len(heads) * shape.head_size if heads else shape.width


def other_widths(
    shapes: Shapes, taps: Iterable[Tap], hidden_size: int
) -> dict[Tap, tuple[int, int]]:
    """Of the taps whose rows are not as wide as the stream: how rows are staged.

    Returns:
        The staging rows that a row takes, each as wide as the stream, and its width.

    """
    widths = {tap: shape_of(shapes, tap, hidden_size).width for tap in taps if shapes}
    return {
        tap: (-(-width // hidden_size), width)
        for tap, width in widths.items()
        if width != hidden_size
    }
