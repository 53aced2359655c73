# SPDX-License-Identifier: Apache-2.0
"""Lets additions to the stream begin before their turn, in the graph that is compiled.

Between two kernels of a decode step an addition costs a launch, at 48 places of a model
of 16 layers as much as 7 % of the step. But a residual that takes a vector is not read
while attention or the MLP compute the branch beside it. So an op is put behind the
first product of that part, which may begin all additions that this residual takes up
to its next use, and another one in front of the last product: which of the two does it
depends on the step. Where neither does, they are done at their places, as if the ops
were not there.

Memory says what uses a residual: of whatever a node reads or writes, the graph has a
fake tensor, and what shares memory shares the storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

PRODUCTS = ("linear", "mm", "gemm", "matmul", "moe")
"""Parts of the names of what is long enough to begin something beside it."""


READERS = (
    "capture_rows",
    "capture_split_rows",
    "intervene_rows",
    "intervene_split_rows",
)
"""Ops of hook points that read the stream, where they launch. Nothing may be begun
early beside one that does."""


@dataclass(frozen=True, slots=True)
class Additions:
    """What one residual takes between two of its uses."""

    steers: Sequence[fx.Node]
    captures: Sequence[fx.Node]
    """The ops of hook points that read it in between."""
    early: fx.Node
    """Behind which they may begin."""
    late: fx.Node | None
    """Behind which they may begin instead."""


def begin_additions_early(graph: fx.Graph, device_type: str = "cuda") -> int:
    """Insert `steer_rows_ahead` wherever that saves time; for how many residuals.

    Args:
        graph: as Dynamo traced it: its nodes, in order, are what the program does, and
            write in place. A graph that was treated before is left as it is.
        device_type: where the stream must be. A stream on a CPU gains nothing.

    """
    if any(_is(node, "steer_rows_ahead") for node in graph.nodes):
        return 0
    found = list(_find(list(graph.nodes), device_type))
    for one in found:
        target = one.steers[0].args[0]
        tables, rows = ([steer.args[i] for steer in one.steers] for i in (1, 2))
        slots = [capture.args[2] for capture in one.captures]
        computed = one.early if _is_product(one.early) else None
        places: list[tuple[fx.Node, fx.Node | None, bool | None]]
        places = [(one.early, computed, None)]
        if one.late is not None:
            places = [(one.early, computed, False), (one.late, one.late, True)]
        for place, behind, late in places:
            with graph.inserting_after(place):
                node = graph.call_function(
                    torch.ops.vllm.steer_rows_ahead,
                    (target, tables, rows, slots, behind, late),
                )
            node.meta.update(one.steers[0].meta)
    return len(found)


def _find(nodes: Sequence[fx.Node], device_type: str) -> Iterator[Additions]:
    known: set[fx.Node] = set()
    order = {node: place for place, node in enumerate(nodes)}
    for place, node in enumerate(nodes):
        if node in known or not _is(node, "steer_rows"):
            continue
        memory = _memory(node.args[0])
        if len(memory) != 1 or not _is_on(node.args[0], device_type):
            continue
        behind, captures_behind = _steers_behind(nodes[place:], memory)
        known.update(behind)
        between, captures = _unused_before(nodes[:place], memory)
        early = _place_for(between)
        if early is None:
            continue
        steers, captures = behind, [*captures, *captures_behind]
        read = [*steers, *captures]
        if all(_is_known_at(one, order[early], order) for one in read):
            late = _late_place_for(between[between.index(early) + 1 :])
            yield Additions(steers, captures, early, late)


def _steers_behind(
    nodes: Sequence[fx.Node], memory: set[int]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Additions to `memory` from the first node on, and captures between them."""
    steers: list[fx.Node] = []
    captures: list[fx.Node] = []
    seen: list[fx.Node] = []
    for node in nodes:
        if _is(node, "steer_rows") and _memory(node.args[0]) == memory:
            steers.append(node)
            captures += seen
            seen = []
        elif _touches(node, memory):
            if not _is_capture(node):
                break
            seen.append(node)
    return steers, captures


def _unused_before(
    nodes: Sequence[fx.Node], memory: set[int]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The last use of `memory` and the nodes behind it; captures among these."""
    captures: list[fx.Node] = []
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        if node.op == "placeholder" or _touches(node, memory):
            if not _is_capture(node):
                return list(nodes[place:]), captures
            captures.append(node)
    return list(nodes), captures


def _place_for(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Behind which node to begin: so that a product is left to do it beside.

    The first product itself is better left alone: both would begin at once, and wait
    for the same memory.
    """
    products = [
        place for place, node in enumerate(nodes) if place and _is_product(node)
    ]
    if not products:
        return None
    begin = nodes[products[0] if len(products) > 1 else products[0] - 1]
    return None if begin.op == "placeholder" else begin


def _late_place_for(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """What the last product waits for, unless that is before the first of `nodes`."""
    products = [node for node in nodes if _is_product(node)]
    read = products[-1].all_input_nodes if products else ()
    made = [node for node in nodes if node in read and _is_computed(node)]
    return made[-1] if made else None


def _is_known_at(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    """Whether all but the stream itself, which an op reads, is there at `place`."""
    read = node.args[2:3] if _is_capture(node) else node.args[1:3]
    return all(order[one] < place for one in read if isinstance(one, fx.Node))


def _is(node: fx.Node, op: str) -> bool:
    packet = getattr(torch.ops.vllm, op)
    return node.op == "call_function" and node.target in (packet, packet.default)


def _is_capture(node: fx.Node) -> bool:
    """Whether it is another op of a hook point, which reads its third argument."""
    return any(_is(node, op) for op in READERS)


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or not _is_computed(node):
        return False
    name = getattr(node.target, "__name__", str(node.target))
    return any(part in name for part in PRODUCTS)


def _is_computed(node: fx.Node) -> bool:
    made = node.meta.get("example_value")
    called = node.op in ("call_function", "call_method")
    return called and isinstance(made, torch.Tensor)


def _is_on(node: object, device_type: str) -> bool:
    assert isinstance(node, fx.Node)
    tensors = tree_leaves(node.meta.get("example_value"))
    return all(one.device.type == device_type for one in tensors)


def _touches(node: fx.Node, memory: set[int]) -> bool:
    return any(
        not memory.isdisjoint(_memory(one)) for one in (node, *node.all_input_nodes)
    )


def _memory(node: object) -> set[int]:
    """The storages of a node's tensors."""
    assert isinstance(node, fx.Node)
    return {
        value.untyped_storage()._cdata
        for value in tree_leaves(node.meta.get("example_value"))
        if isinstance(value, torch.Tensor)
    }
