# SPDX-License-Identifier: Apache-2.0
"""The hook points of layers whose residual is several streams, and their proof.

No tensor of such a layer is the residual stream: its sublayers read a mix of the
streams, and write to all of them. What enters and leaves the layer is the whole state
between layers, so both points together replace those of a single stream.
"""

from __future__ import annotations

from .events import Trace
from .stream import Role, Term, Unprovable, origins

STREAMS_PRE, STREAMS_POST = "streams_pre", "streams_post"
STREAMS = (STREAMS_PRE, STREAMS_POST)
SEVERAL = "its residual is several streams"
SINGLE = "its residual is one stream"
NO_SUM = "its residual is several streams, to which a block does not add a branch alone"
"""Why such a layer has neither `attn_add` nor `mlp_add`."""


def _is_entry(held: frozenset[Term], entry: frozenset[Term]) -> bool:
    """Whether terms are those that enter, or made of them by no part of a block."""
    if held == entry:
        return True
    made = {Role.OTHER, Role.BESIDE}
    parts = frozenset(term for term in held if term.role in made)
    return parts == held and all(_is_entry(term.reads, entry) for term in parts)


def prove_streams(trace: Trace) -> None:
    """Check both points on one path of a woven `forward`.

    Raises:
        Unprovable: something reads the streams around a point, or returns others.
    """
    taps = [event for event in trace.events if event.kind == "tap"]
    met = tuple(event.label.split()[1] for event in taps)
    if met != STREAMS:
        raise Unprovable(f"a path meets {', '.join(met) or 'no point'}")
    entering, leaving = taps
    if not _is_entry(entering.held(), frozenset(trace.entry[0].terms)):
        raise Unprovable(f"{STREAMS_PRE} does not hold what enters the layer")
    before = {term.point for term in origins(leaving.held())}
    if before != {STREAMS_PRE}:
        raise Unprovable(f"{STREAMS_POST} is computed around {STREAMS_PRE}")
    returned = trace.events[-1].held()
    if {(t.role, t.point) for t in returned} != {(Role.TAP, STREAMS_POST)}:
        raise Unprovable(f"{STREAMS_POST} is not what the layer returns")
