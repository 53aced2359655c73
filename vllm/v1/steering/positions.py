# SPDX-License-Identifier: Apache-2.0
"""Where in a sequence an operation acts: the form that travels, and its grammar.

This module imports neither torch nor the rest of steering, because
`vllm.sampling_params` imports what uses it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

FARTHEST = 2**31
"""No position is farther from the start, or from the end, of a prompt."""


LISTED = 64
"""So many positions are described one by one."""


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The positions `[start, stop)`."""

    from_end: bool
    """Counted from the prompt's end, where 0 is the first generated token."""
    start: int
    stop: int

    def within(self, num_prompt: int, start: int, stop: int) -> range:
        """Its positions in `[start, stop)`, for a prompt of this length."""
        offset = num_prompt if self.from_end else 0
        first = max(self.start + offset, start, 0)
        return range(first, max(first, min(self.stop + offset, stop)))

    @property
    def is_open(self) -> bool:
        """Whether it stands for whatever there is of its tokens, if there is any."""
        counts_back = self.from_end and self.stop == 0
        return counts_back or self.stop >= FARTHEST


Positions: TypeAlias = tuple[Span, ...]
"""Ascending, those of either kind apart from one another."""

NAMED: dict[str, Positions | None] = {
    "all": None,
    "last_prompt": (Span(True, -1, 0),),
    "all_prompt": (Span(True, -FARTHEST, 0),),
    "all_generated": (Span(True, 0, FARTHEST),),
}
"""What the selectors stand for; None: every token."""


def spans(positions: Iterable[int]) -> Positions:
    """The spans of single positions, negative ones from the prompt's end."""
    return joined(Span(p < 0, p, p + 1) for p in positions)


def joined(found: Iterable[Span]) -> Positions:
    """The same positions in as few spans as can be."""
    made: list[Span] = []
    for one in sorted(found):
        last = made[-1] if made else None
        if last and last.from_end == one.from_end and one.start <= last.stop:
            made[-1] = Span(one.from_end, last.start, max(last.stop, one.stop))
        else:
            made.append(one)
    return tuple(made)


def last_of(positions: Positions, num_prompt: int) -> int:
    """The last position of all, for a prompt of this length."""
    return max(s.stop - 1 + (num_prompt if s.from_end else 0) for s in positions)


def missed(positions: Positions, num_prompt: int, possible: range) -> int | None:
    """A position, as it was given, that no token of `possible` has, if any.

    Spans that are open need one token; of the others each position is meant.
    """
    for one in positions:
        found = one.within(num_prompt, possible.start, possible.stop)
        if one.is_open and not found:
            return max(one.start, -num_prompt)
        if not one.is_open and len(found) < one.stop - one.start:
            offset = num_prompt if one.from_end else 0
            return next(
                p for p in range(one.start, one.stop) if p + offset not in found
            )
    return None


def describe(positions: Positions | None) -> Any:
    """As a user would write it: a name, `{"last": k}`, a list or ranges."""
    if positions is None:
        return None
    for name in ("all_prompt", "all_generated"):
        if positions == NAMED[name]:
            return name
    if sum(one.stop - one.start for one in positions) <= LISTED:
        return sorted(_each(positions))
    if len(positions) == 1 and positions[0].from_end and positions[0].stop == 0:
        return {"last": -positions[0].start}
    return {"ranges": [[one.start, one.stop - 1] for one in positions]}


def _each(positions: Positions) -> Iterator[int]:
    for one in positions:
        yield from range(one.start, one.stop)


def most_at_once(several: Iterable[Positions]) -> int:
    """How many of these may act at one token, whatever the length of the prompt.

    Positions from the start and from the end of the prompt may always meet.
    """
    ends: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for positions in several:
        for one in positions:
            ends[one.from_end] += [(one.start, 1), (one.stop, -1)]
    total = 0
    for of_kind in ends.values():
        depth = most = 0
        for _, change in sorted(of_kind):
            depth += change
            most = max(most, depth)
        total += most
    return total
