# SPDX-License-Identifier: Apache-2.0
"""The optional hook points on what a sublayer adds: `attn_add` and `mlp_add`.

They hold the summand of the stream, behind all norms and multipliers of the branch. A
layer lacks one if the summand has no single place in `forward`, or if the stream is
more than the plain sum: of the 96 layer classes of 0.32.0 86 have `attn_add` and 83
`mlp_add`. Without them `hook_attn_out` and `hook_mlp_out` of other systems have no
meaning where a norm or a multiplier follows the module, as in Gemma and Granite.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from .events import Event, Trace
from .mlp_points import MLP_OUT
from .placement import BLOCK, POST, Site, final_terms, merged
from .stream import Role, Term, Unprovable, sublayers

ATTN_ADD, MLP_ADD = "attn_add", "mlp_add"
_BRANCHES = {
    ATTN_ADD: (Role.MIXER, POST, "token mixer"),
    MLP_ADD: (Role.MLP, BLOCK, "MLP"),
}
ADDED_POINTS = tuple(_BRANCHES)


def stream_behind(point: str) -> str:
    """The stream's point at which a branch has been added; other points are kept."""
    return _BRANCHES[point][1] if point in _BRANCHES else point


def place_added(traces: Sequence[Trace], point: str, early: bool) -> list[Site]:
    """The sites of one of the points; every path must have it.

    Args:
        traces: all paths through the layer, without taps.
        point: one of `ADDED_POINTS`.
        early: whether to put it where the summand is computed instead of where it is
            added, which is too late where the stream's own point comes first.

    Raises:
        Unprovable: a path has no such branch, or its summand has no single place.
    """
    return merged([_site(trace, point, early) for trace in traces])


def _site(trace: Trace, point: str, early: bool) -> Site:
    role, _, name = _BRANCHES[point]
    branch = {t for t in final_terms(trace) if sublayers(t) == {role}}
    if not branch:
        raise Unprovable(f"a path adds no output of a {name}")
    kinds = ("made", "add") if early else ("fused", "sum", "return")
    for event in trace.events:
        if event.kind not in kinds:
            continue
        for index, tensor in enumerate(event.tensors):
            if tensor is not None and tensor.terms.keys() == branch:
                return _site_at(event, index, point, early)
    if len(branch) > 1:
        raise Unprovable(f"several {name}s add to the stream, each on its own")
    raise Unprovable(f"what a {name} adds is no tensor of its own")


def _site_at(event: Event, index: int, point: str, early: bool) -> Site:
    name = event.names[index]
    if name.isidentifier():
        return Site(point, "value", (name,), event.statement, after=early)
    return Site(point, "value", (), _operand(event, index))


def _operand(event: Event, index: int) -> cst.CSTNode:
    """The expression of a sum or a return that the event names at `index`."""
    node = event.node
    if isinstance(node, cst.BinaryOperation):
        return (node.left, node.right)[index]
    if isinstance(node, cst.AugAssign):
        return node.value
    if isinstance(node, cst.Return) and isinstance(node.value, cst.Tuple):
        return node.value.elements[index].value
    raise Unprovable(f"what is added has no name: {event.names[index]}")


def is_partial(traces: Sequence[Trace], point: str) -> bool:
    """Whether what the point holds is summed over the ranks after it."""
    behind = BLOCK if point == MLP_OUT else stream_behind(point)
    partial = f"partial {behind}"
    return any(
        point in _held(term) and (weight.reductions or event.label == partial)
        for trace in traces
        for event in trace.events
        for tensor in event.tensors
        if tensor is not None
        for term, weight in tensor.terms.items()
    )


def _held(term: Term) -> set[str | None]:
    """The point of a term, and those that were tapped directly before it."""
    if term.point is None or term.role is Role.TAP:
        return {term.point}
    return {term.point}.union(*map(_held, term.reads))


def prove_added(trace: Trace, point: str) -> None:
    """Check one of the points on one path of a woven `forward`.

    Raises:
        Unprovable: the stream behind the branch is not the stream before it plus what
            the point holds.
    """
    _, behind, name = _BRANCHES[point]
    met = [e for e in trace.events if e.kind == "value" and e.label == point]
    taps = [e for e in trace.events if e.kind == "tap"]
    tap = next((e for e in taps if e.label.split()[1] == behind), None)
    if tap is None or len(met) != 1:
        raise Unprovable(f"a path meets {point} {len(met)} times, or no {behind}")
    terms = [item for tensor in tap.tensors if tensor for item in tensor.terms.items()]
    if any(weight.scalings for _, weight in terms):
        raise Unprovable(f"the stream is scaled behind what a {name} adds")
    added = [term for term, _ in terms if term.role is not Role.TAP]
    if [term.point for term in added] != [point]:
        raise Unprovable(f"{behind} holds more than the stream and what a {name} adds")
