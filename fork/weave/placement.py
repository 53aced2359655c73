# SPDX-License-Identifier: Apache-2.0
"""Finds where to insert the call of each hook point in a layer's `forward`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from .events import Event, Trace
from .interpreter import RESIDUAL
from .layer_class import LayerClass, code
from .rules import Anchor
from .stream import Role, Term, Unprovable, Weight, check_known, sublayers

PRE, POST, BLOCK = "pre_attn", "post_attn", "post_block"
POINTS = (PRE, POST, BLOCK)


@dataclass(frozen=True, slots=True)
class Site:
    """One call to insert: `a, b = residual_tap.<method>(self, point, a, b)`."""

    point: str
    method: str
    """`pair`, `partial` or `stream`."""
    arguments: tuple[str, ...]
    """Source text of the tensors; names are assigned the results."""
    statement: cst.CSTNode
    """The statement of the original tree at which the call is inserted.

    A function definition stands for its first statement.
    """
    after: bool = False
    """Whether the call follows the statement."""
    condition: str = ""
    """Expression that selects the method: `partial` if true, else `pair`."""
    then: tuple[str, ...] = ()
    """Statements to insert after the call."""
    split_when: str = ""
    """Expression that is true if each rank has only its share of the tokens here."""
    run: str = ""
    """Parameter of `forward` that has the number of the run, if there are several."""

    @property
    def is_first(self) -> bool:
        """Whether the call precedes everything else in its method."""
        return isinstance(self.statement, cst.FunctionDef) and self.point == PRE


def anchored(cls: LayerClass, anchors: Sequence[Anchor]) -> list[Site]:
    """The sites that a rule's anchors name in the methods of a class.

    Raises:
        Unprovable: an anchor matches no statement, or several.
    """
    return [
        Site(one.point, one.method, one.arguments, _statement(cls, one), one.after)
        for one in anchors
    ]


def _statement(cls: LayerClass, anchor: Anchor) -> cst.CSTNode:
    if anchor.within not in cls.methods:
        raise Unprovable(f"the rule's anchor is in {anchor.within}, which is not there")
    statements = m.findall(cls.methods[anchor.within], m.SimpleStatementLine() | m.If())
    found = [
        node
        for node in statements
        if code(node.with_changes(leading_lines=())).startswith(anchor.statement)
    ]
    if len(found) != 1:
        raise Unprovable(
            f"the rule's anchor {anchor.statement!r} begins {len(found)} statements"
        )
    return found[0]


def place(
    traces: Sequence[Trace], method: cst.FunctionDef, wanted: Set[str]
) -> list[Site]:
    """The sites that give every path the `wanted` hook points, in order of execution.

    Raises:
        Unprovable: the stream cannot be found at a point of some path.
    """
    hidden = [trace.entry[0] for trace in traces]
    partial_in = any(
        weight.reductions
        for trace, entry in zip(traces, hidden, strict=True)
        for term, weight in final_terms(trace).items()
        if term in entry.terms
    )
    paired_in = any(
        term.label == RESIDUAL for trace in traces for term in final_terms(trace)
    )
    arguments = (next(iter(hidden[0].terms)).label, RESIDUAL)
    pair = "partial" if partial_in else "pair"
    first = Site(
        PRE,
        pair if paired_in else "stream",
        arguments if paired_in else arguments[:1],
        method,
    )
    sites = [first]
    for trace in traces:
        last = trace.events[-1]
        names = _leaving(last) if BLOCK in wanted else last.names[:1]
        method_out = pair if len(names) == 2 else "stream"
        leaving = Site(BLOCK, method_out, names, last.statement)
        if POST in wanted:
            sites.append(_after_mixer(trace, traces, first, leaving))
        sites.append(leaving)
    return merged([site for site in sites if site.point in wanted])


def final_terms(trace: Trace) -> dict[Term, Weight]:
    """The terms in the stream that the layer returns, with their weights."""
    tensors = [t for t in trace.events[-1].tensors if t is not None]
    return {t: w for tensor in reversed(tensors) for t, w in tensor.terms.items()}


def _leaving(event: Event) -> tuple[str, ...]:
    """The names that hold the stream at a return.

    A residual that is contained in the first tensor is stale and left out.
    """
    held = [
        (name, tensor)
        for name, tensor in zip(event.names, event.tensors, strict=True)
        if tensor is not None
    ]
    if not held or event.tensors[0] is None:
        raise Unprovable("what forward returns first does not come from the stream")
    if len(held) > 2:
        raise Unprovable(f"forward returns {len(held)} tensors of the stream")
    if len(held) == 1:
        return (held[0][0],)
    (first, hidden), (second, residual) = held
    shared = hidden.terms.keys() & residual.terms.keys()
    if shared and shared != residual.terms.keys():
        raise Unprovable("the two returned tensors share some but not all terms")
    return (first,) if shared else (first, second)


def _after_mixer(
    trace: Trace, traces: Sequence[Trace], first: Site, leaving: Site
) -> Site:
    final = final_terms(trace)
    roles = {t: sublayers(t) for t in final if t.role is not Role.ENTRY}
    check_known(roles)
    if any(len(found) > 1 for found in roles.values()):
        raise Unprovable("one summand holds the token mixer's and the MLP's output")
    mixers = {t for t, found in roles.items() if found == {Role.MIXER}}
    mlps = {t for t, found in roles.items() if found == {Role.MLP}}
    if not mixers:
        return Site(POST, first.method, first.arguments, first.statement)
    for event in trace.events:
        if event.kind not in ("fused", "add"):
            continue
        held = event.held()
        enters = any(term.role is Role.ENTRY for term in held)
        if mixers <= held and enters and not held & mlps:
            fused = event.kind == "fused"
            reduces = fused and "reduce" in event.label
            return Site(
                POST,
                ("partial" if reduces else "pair") if fused else "stream",
                event.names,
                event.statement,
                after=not fused,
            )
    if not mlps:
        return Site(POST, leaving.method, leaving.arguments, leaving.statement)
    partial = any(_reduced(t, mixers) for t in traces)
    return _parallel(trace, mixers, mlps, partial)


def _reduced(trace: Trace, mixers: set[Term]) -> bool:
    labels = {term.label for term in mixers}
    return any(
        weight.reductions
        for term, weight in final_terms(trace).items()
        if term.label in labels
    )


def _parallel(trace: Trace, mixers: set[Term], mlps: set[Term], partial: bool) -> Site:
    """The site of `post_attn` in a block whose mixer and MLP read the same input.

    The mixer's output is paired with the stream at entry. The call goes before the
    statement that sums both, when the MLP has read the stream already; if that
    statement does not name both, it goes after the mixer.
    """
    if len(mixers) > 1:
        raise Unprovable("several token mixers in a parallel block")
    method = "partial" if partial else "pair"
    for event in trace.events:
        if event.kind == "add" and event.held() & mixers and event.held() & mlps:
            branch = _holder(event, mixers)
            stream = _holder(event, _entry(trace))
            if branch and stream:
                return Site(POST, method, (branch, stream), event.statement)
            break
    for event in trace.events:
        if event.kind == "made" and event.held() == mixers:
            stream = _holder(event, _entry(trace))
            if stream is None:
                raise Unprovable("no name holds the entry stream beside the mixer's")
            names = (event.names[0], stream)
            return Site(POST, method, names, event.statement, after=True)
    raise Unprovable("the token mixer's output has no name of its own")


def _entry(trace: Trace) -> set[Term]:
    """The terms at the layer's entry that are part of the stream."""
    entry = {t for tensor in trace.entry for t in tensor.terms}
    return final_terms(trace).keys() & entry


def _holder(event: Event, terms: Set[Term]) -> str | None:
    """The most recently bound name that holds exactly `terms`."""
    for name, tensor in reversed(event.holding):
        if tensor.terms.keys() == terms:
            return name
    return None


def merged(sites: list[Site]) -> list[Site]:
    """The sites of all paths without repeats.

    Raises:
        Unprovable: paths disagree about a site.

    """
    merged: dict[tuple[int, bool, str], Site] = {}
    for site in sites:
        known = merged.setdefault((id(site.statement), site.after, site.point), site)
        if known != site:
            raise Unprovable(
                f"{site.point} is {known.method}({', '.join(known.arguments)}) on one "
                f"path and {site.method}({', '.join(site.arguments)}) on another"
            )
    return list(merged.values())
