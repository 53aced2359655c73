# SPDX-License-Identifier: Apache-2.0
"""Graph pass that overlaps steering additions with attention and the MLP.

In a decode step each addition costs a kernel launch: with 48 of them in a model of 16
layers, up to 7 % of the step. The residual that receives the vector is not read while
attention or the MLP compute the branch. The pass therefore inserts an op after the
first matrix product of that part, which may start all additions to this residual up to
its next use, and another op before the last product. The size of the step decides
which of the two starts them. If neither does, the additions run in their original
places.

Uses of a residual are found by storage: the graph has a fake tensor for everything a
node reads or writes, and tensors that share memory share the fake tensor's storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

PRODUCTS = ("linear", "mm", "gemm", "matmul", "moe")
"""Substrings of the names of functions that run long enough to hide an addition."""


READERS = ("capture_rows", "intervene_rows")
"""Hook-point ops that read the stream if they launch.

No addition may start early across one that launches.
"""


@dataclass(frozen=True, slots=True)
class Additions:
    """The additions to one residual between two of its uses."""

    steers: Sequence[fx.Node]
    captures: Sequence[fx.Node]
    """The `READERS` that read the residual in between."""
    early: fx.Node
    """The node after which the additions may start."""
    late: fx.Node | None
    """A later node after which they may start instead."""


def begin_additions_early(graph: fx.Graph, device_type: str = "cuda") -> int:
    """Insert `steer_rows_ahead` wherever that saves time.

    Args:
        graph: as traced by Dynamo: nodes are in program order and may write in place.
            Changed in place, unless the pass has already been applied to it.
        device_type: the device type of the stream. On a CPU there is nothing to gain.

    Returns:
        The number of `Additions` that may now start early.

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
        for place, after, late in places:
            with graph.inserting_after(place):
                node = graph.call_function(
                    torch.ops.vllm.steer_rows_ahead,
                    (target, tables, rows, slots, after, late),
                )
            node.meta.update(one.steers[0].meta)
    return len(found)


def _find(nodes: Sequence[fx.Node], device_type: str) -> Iterator[Additions]:
    known: set[fx.Node] = set()
    order = {node: place for place, node in enumerate(nodes)}
    for place, node in enumerate(nodes):
        if node in known or not _is_addition(node):
            continue
        memory = _memory(node.args[0])
        if len(memory) != 1 or not _is_on(node.args[0], device_type):
            continue
        later, later_captures = _additions_after(nodes[place:], memory)
        known.update(later)
        between, captures = _unused_before(nodes[:place], memory)
        early = _place_for(between)
        if early is None:
            continue
        steers, captures = later, [*captures, *later_captures]
        read = [*steers, *captures]
        if all(_is_known_at(one, order[early], order) for one in read):
            late = _late_place_for(between[between.index(early) + 1 :])
            yield Additions(steers, captures, early, late)


def _additions_after(
    nodes: Sequence[fx.Node], memory: set[int]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Additions to `memory` up to its next use, and the captures between them."""
    steers: list[fx.Node] = []
    captures: list[fx.Node] = []
    seen: list[fx.Node] = []
    for node in nodes:
        if _is_addition(node) and _memory(node.args[0]) == memory:
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
    """The nodes from the last use of `memory` on, and the captures among them."""
    captures: list[fx.Node] = []
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        if node.op == "placeholder" or _touches(node, memory):
            if not _is_capture(node):
                return list(nodes[place:]), captures
            captures.append(node)
    return list(nodes), captures


def _place_for(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The node after which the additions start, so that a product runs in parallel.

    With several products this is the first: starting together with it would make both
    compete for memory bandwidth.
    """
    products = [
        place for place, node in enumerate(nodes) if place and _is_product(node)
    ]
    if not products:
        return None
    begin = nodes[products[0] if len(products) > 1 else products[0] - 1]
    return None if begin.op == "placeholder" else begin


def _late_place_for(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The last input of the last product that is computed within `nodes`, or None."""
    products = [node for node in nodes if _is_product(node)]
    read = products[-1].all_input_nodes if products else ()
    made = [node for node in nodes if node in read and _is_computed(node)]
    return made[-1] if made else None


def _is_known_at(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    """Whether the op's inputs other than the stream are computed before `place`."""
    read = node.args[2:3] if _is_capture(node) else node.args[1:3]
    return all(order[one] < place for one in read if isinstance(one, fx.Node))


def _is(node: fx.Node, op: str) -> bool:
    packet = getattr(torch.ops.vllm, op)
    return node.op == "call_function" and node.target in (packet, packet.default)


def _is_addition(node: fx.Node) -> bool:
    """Whether the node adds vectors to tokens that ranks do not split."""
    return _is(node, "steer_rows") and True not in node.args[4:]


def _is_capture(node: fx.Node) -> bool:
    """Whether the node is one of `READERS`; its third argument is read at launch."""
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
    """Identities of the storages of a node's tensors."""
    assert isinstance(node, fx.Node)
    return {
        value.untyped_storage()._cdata
        for value in tree_leaves(node.meta.get("example_value"))
        if isinstance(value, torch.Tensor)
    }
