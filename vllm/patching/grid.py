# SPDX-License-Identifier: Apache-2.0
"""The cells of a sweep: hook points, layers, heads and columns of positions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.patching.places import Column
from vllm.v1.residual.addresses import hook_name, why_not
from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list, parse_layers
from vllm.v1.steering.errors import fail

MOST_CELLS = 1 << 18
"""Most cells of a sweep."""
READ_BY_OTHERS = ("embed", "pre_attn", "attn_in", "k", "v")
"""Hook points at which a token's row reaches other tokens in the same layer."""


class Facts(NamedTuple):
    """What a sweep needs to know of an engine."""

    hook_points: Mapping[int, Sequence[str]]
    """The hook points of each layer."""
    heads: Mapping[str, int]
    """The number of heads, of hook points that have heads."""
    max_length: int
    """Most tokens of a request."""
    vocabulary: int
    most_logprobs: int
    """Most log-probabilities of likely tokens that a request may have."""
    keeper: tuple[str, str] | None
    """The consumer that keeps rows, and the key of its specs that has the name."""

    @property
    def last_layer(self) -> int:
        """The last layer."""
        return max(self.hook_points)


class Cell(NamedTuple):
    """One patch of a grid."""

    hook: str
    layer: int
    head: int | None
    column: Column
    place: tuple[int, ...]
    """Its index in the hook point's array."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a sweep."""

    hooks: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    columns: tuple[Column, ...]
    having: Mapping[str, frozenset[int]]
    """The layers that have each hook point."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each hook point's array: layers, heads if there are any, columns."""
        heads = () if self.heads is None else (len(self.heads),)
        return (len(self.layers), *heads, len(self.columns))

    def cells(self) -> Iterator[Cell]:
        """All cells, those of a layer after those of the layers before it.

        Cells next to each other have different positions, so that all steps have about
        as many tokens. Those of late positions compute few and wait for the host.
        """
        for hook in self.hooks:
            for row, layer in enumerate(self.layers):
                for at, head in enumerate(self.heads or [None]):
                    middle = () if head is None else (at,)
                    for number, column in enumerate(self.columns):
                        place = (row, *middle, number)
                        yield Cell(hook, layer, head, column, place)

    def taps(self) -> dict[str, list[int]]:
        """The layers of the grid that have each hook point."""
        return {
            hook: [layer for layer in self.layers if layer in self.having[hook]]
            for hook in self.hooks
        }


def grid_of(
    hooks: Any, layers: Any, heads: Any, columns: Sequence[Column], facts: Facts
) -> Grid:
    """Check the axes of a sweep.

    Args:
        hooks: a name or a list of names.
        layers: a selector of layers; `"all"` of those that have a hook point.
        heads: a list of heads, or `"all"`; None to patch whole rows.
        columns: of the grid.
        facts: about the engine.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    names = [hooks] if isinstance(hooks, str) else as_list(hooks)
    if not isinstance(names, (list, tuple)) or not names:
        raise fail("hooks must name at least one hook point", "hooks", hooks)
    having: dict[str, frozenset[int]] = {}
    for name in names:
        hook, at = _hook(name, facts)
        if hook in having:
            raise fail(f"hooks: {hook} is given twice", "hooks", name)
        having[hook] = at
    everywhere = sorted(frozenset().union(*having.values()))
    number = facts.last_layer + 1
    chosen = set(parse_layers(layers, everywhere, number, "layers", fail))
    if layers != "all":
        for hook, at in having.items():
            if chosen - at:
                raise fail(
                    f"layers: layer {min(chosen - at)} of this model does not have "
                    f"{hook}; these have it: {listed(sorted(at))}",
                    "layers",
                    min(chosen - at),
                )
    wanted = None if heads is None else _heads(heads, list(having), facts)
    found = Grid(tuple(having), tuple(sorted(chosen)), wanted, tuple(columns), having)
    count = len(found.hooks)
    for size in found.shape:
        count *= size
    if count > MOST_CELLS:
        raise fail(
            f"layers: the grid has {count} cells, and at most {MOST_CELLS} are "
            "allowed; sweep fewer layers, positions or hook points",
            "layers",
            count,
        )
    return found


def _hook(name: Any, facts: Facts) -> tuple[str, frozenset[int]]:
    """Our name of a hook point, and the layers that have it."""
    known = hook_name(name) if isinstance(name, str) else None
    having = [n for n, points in facts.hook_points.items() if known in points]
    if known is None or not having:
        every = sorted({point for one in facts.hook_points.values() for point in one})
        why = "" if known is None else why_not(known)
        raise fail(
            f"hooks: this engine has no hook point {shown(name)}; it has {every}"
            f"{why}. Points inside the block need --hook-points",
            "hooks",
            name,
        )
    return known, frozenset(having)


def _heads(raw: Any, hooks: Sequence[str], facts: Facts) -> tuple[int, ...]:
    counts = {facts.heads.get(hook, 0) for hook in hooks}
    if counts == {0} or len(counts) > 1:
        raise fail(
            f"heads: {hooks} do not all have the same heads; hook points with heads "
            f"here are {listed(sorted(facts.heads))} (--hook-points q k v z)",
            "heads",
            raw,
        )
    count = counts.pop()
    if isinstance(raw, str) and raw == "all":
        return tuple(range(count))
    heads = as_list(raw)
    if not isinstance(heads, (list, tuple)) or not heads:
        raise fail('heads must be "all", or list heads', "heads", raw)
    for head in heads:
        if not is_integer(head, 0, count):
            raise fail(f"heads: {hooks[0]} has heads 0 to {count - 1}", "heads", head)
    return tuple(sorted({int(head) for head in heads}))
