# SPDX-License-Identifier: Apache-2.0
"""Proves that every path of a woven layer meets every hook point with the stream.

The woven `forward` is interpreted again, now with the taps in it. A tap returns new
terms, which show whether an intervention at a point reaches everything after it exactly
once.
"""

from __future__ import annotations

from collections.abc import Set

from .events import Event, Trace
from .placement import BLOCK, POINTS, POST, PRE
from .stream import Role, Term, Unprovable, check_known, origins, reached, sublayers


def prove(trace: Trace, several_mixers: bool = False) -> None:
    """Check the hook points on one path of a woven `forward`.

    Raises:
        Unprovable: a point does not hold the stream; the message names it and says why.
    """
    taps = [event for event in trace.events if event.kind == "tap"]
    met = tuple(event.label.split()[1] for event in taps)
    if met != POINTS:
        raise Unprovable(f"a path meets {', '.join(met) or 'no point'}")
    before, after, leaving = taps
    entry = frozenset(t for tensor in trace.entry for t in tensor.terms)
    start = before.held() & entry
    if not start or before.held() - entry:
        raise Unprovable(f"{PRE} does not hold what enters the layer")
    first = _results(trace, PRE)
    added = _additions(after, first, POST)
    _check_source(added, first, POST)
    if any(sublayers(term) != {Role.MIXER} for term in added):
        raise Unprovable(f"{POST} holds more than the token mixer's output")
    second = _results(trace, POST)
    added = _additions(leaving, second, BLOCK)
    if not several_mixers and any(Role.MIXER in sublayers(t) for t in added):
        raise Unprovable(f"a token mixer's output is added after {POST}")
    check_known(added)
    _check_source(added, second | first, BLOCK)
    _check_return(trace)
    _check_reductions(trace, taps)


def _results(trace: Trace, point: str) -> frozenset[Term]:
    """The terms that the tap at `point` returned, found where they are used."""
    held = (term for event in trace.events for term in event.held())
    return frozenset(term for term in reached(held) if term.point == point)


def _additions(event: Event, stream: Set[Term], point: str) -> frozenset[Term]:
    """The terms added to `stream` before `event`, which must hold all of `stream`."""
    held = event.held()
    tensors = [t for t in event.tensors if t is not None]
    if sum(len(t.terms) for t in tensors) != len(held):
        raise Unprovable(f"{point} would count a tensor twice")
    if not stream <= held:
        raise Unprovable(f"{point} misses a part of the stream")
    parts = [w.scalings for x in tensors for t, w in x.terms.items() if t in stream]
    if len(set(parts)) > 1:
        raise Unprovable(f"the parts of the stream are scaled apart before {point}")
    return held - stream


def _check_reductions(trace: Trace, taps: list[Event]) -> None:
    """Check that only the branch of a `partial` is summed over ranks after its tap."""
    methods = {point: method for method, point in (t.label.split() for t in taps)}
    summed: set[str] = set()
    for event in trace.events:
        for tensor in filter(None, event.tensors):
            for term, weight in tensor.terms.items():
                partial = methods.get(term.point or "") == "partial" and not term.part
                if term.role is not Role.TAP or not weight.reductions:
                    continue
                if not partial:
                    raise Unprovable(f"{term.point} is reduced over ranks after it")
                summed.add(term.point or "")
    expected = {p for p, method in methods.items() if method == "partial"} - {BLOCK}
    if len(trace.entry) == 1:  # without a residual the branch is the whole stream
        expected.discard(PRE)
    if expected - summed:
        raise Unprovable(f"{', '.join(expected - summed)} is not reduced after it")


def _check_source(added: Set[Term], stream: Set[Term], point: str) -> None:
    for term in added:
        read = origins([term])
        stray = read - stream
        if stray:
            names = ", ".join(sorted(t.label for t in stray))
            raise Unprovable(f"{term.label} before {point} is computed from {names}")
        for tap in read:
            whole = {other for other in stream if other.point == tap.point}
            if not whole <= read:
                raise Unprovable(f"{term.label} reads half of {tap.point}")


def _check_return(trace: Trace) -> None:
    event = trace.events[-1]
    tapped = _results(trace, BLOCK)
    streams = [t for t in event.tensors if t is not None]
    if not streams or not streams[0].terms.keys() <= tapped:
        raise Unprovable(f"{BLOCK} is not what the layer returns")
    returned = frozenset(t for tensor in streams for t in tensor.terms if t in tapped)
    if returned != tapped:
        raise Unprovable(f"a part of {BLOCK} is not returned")
