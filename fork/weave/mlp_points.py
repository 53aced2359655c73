# SPDX-License-Identifier: Apache-2.0
"""The optional hook points around a layer's MLP: `mlp_in` and `mlp_out`.

They are not on the stream and therefore optional: a layer lacks them if the MLP's input
or output has no single place in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import libcst as cst
import libcst.matchers as m

from .events import Event, Trace
from .layer_class import code
from .placement import Site, final_terms, merged
from .stream import Role, Term, Unprovable, reached

MLP_IN, MLP_OUT = "mlp_in", "mlp_out"
_UNPACKED = m.SimpleStatementLine(
    body=[m.Assign(targets=[m.AssignTarget(target=m.Tuple())])]
)
MLP_POINTS = (MLP_IN, MLP_OUT)
_OF_STREAM = (Role.ENTRY, Role.TAP, Role.STREAM)


def place_mlp(traces: Sequence[Trace], early: bool) -> list[Site]:
    """The sites of both points; every path must have both.

    Args:
        traces: all paths through the layer.
        early: whether to put `mlp_in` where the input is computed, so that everything
            that reads it is covered, instead of before the first call of the MLP.

    Raises:
        Unprovable: a path has no MLP, or its input or output has no single place.
    """
    return merged([site for trace in traces for site in _sites(trace, early)])


def _sites(trace: Trace, early: bool) -> tuple[Site, Site]:
    calls = [event for event in trace.events if event.kind == "mlp"]
    if not calls:
        raise Unprovable("a path has no MLP")
    entering = _where_made(trace, calls[0]) if early else _where_read(calls)
    whole = _outputs(final_terms(trace).keys())
    for event in trace.events:
        if event.kind in ("made", "add") and event.held() == whole:
            return entering, Site(
                MLP_OUT, "value", event.names[:1], event.statement, after=True
            )
    if len(calls) > 1:
        raise Unprovable("the MLP's output has no name")
    if m.matches(calls[0].statement, _UNPACKED):
        raise Unprovable("the MLP's output is one of several results")
    assert isinstance(calls[0].node, cst.Call)
    return entering, Site(MLP_OUT, "value", (), calls[0].node)


def _where_read(calls: Sequence[Event]) -> Site:
    """Before the first call's statement, or around the argument if it is a call."""
    name, node = calls[0].names[0], calls[0].node
    if name.isidentifier():
        return Site(MLP_IN, "value", (name,), calls[0].statement)
    assert isinstance(node, cst.Call)
    for argument in node.args:
        if code(argument.value) == name and isinstance(argument.value, cst.Call):
            return Site(MLP_IN, "value", (), argument.value)
    raise Unprovable(f"the MLP's input has no name: {name}")


def _where_made(trace: Trace, call: Event) -> Site:
    wanted = call.tensors[0]
    assert wanted is not None
    for event in trace.events:
        made = event.tensors[0] if event.kind == "made" else None
        if made is not None and made.terms == wanted.terms:
            return Site(MLP_IN, "value", event.names[:1], event.statement, after=True)
    raise Unprovable("the MLP's input has no name where it is made")


def _outputs(terms: Set[Term]) -> frozenset[Term]:
    """The nearest results of an MLP from which `terms` were computed."""
    reached = _reached(terms, frozenset())
    return frozenset(term for term in reached if term.role is Role.MLP)


def _reached(terms: Set[Term], points: Set[str]) -> frozenset[Term]:
    """Terms from which `terms` were computed, up to sublayers, taps and `points`."""
    roles = (*_OF_STREAM, Role.MIXER, Role.MLP)
    found = reached(terms, lambda term: term.role in roles or term.point in points)
    return frozenset(term for term in found if term.point not in points)


def prove_mlp(trace: Trace) -> None:
    """Check the MLP's hook points on one path of a woven `forward`.

    Raises:
        Unprovable: a point does not hold; the message names it and says why.
    """
    met = tuple(
        event.label
        for event in trace.events
        if event.kind == "value" and event.label in MLP_POINTS
    )
    if met != MLP_POINTS:
        raise Unprovable(f"a path meets {', '.join(met) or 'no point of the MLP'}")
    if any(t.role is Role.MLP for t in _reached(final_terms(trace).keys(), {MLP_OUT})):
        raise Unprovable(f"an MLP's output goes around {MLP_OUT}")
    held = {term for event in trace.events for term in event.held()}
    mixers = (term for term in held if term.role is Role.MIXER)
    if any(term.point == MLP_IN for term in reached(mixers)):
        raise Unprovable(f"a token mixer reads {MLP_IN}")
    for event in trace.events:
        if event.kind == "mlp" and not _only_from_tap(event):
            raise Unprovable(f"{event.label} reads more than {MLP_IN}")


def _only_from_tap(event: Event) -> bool:
    """Whether everything that the call reads was computed from `mlp_in`."""
    read = reached(event.held(), lambda term: term.point == MLP_IN)
    return all(t.point == MLP_IN or t.role not in _OF_STREAM for t in read)
