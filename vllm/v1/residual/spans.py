# SPDX-License-Identifier: Apache-2.0
"""Token positions as spans, whose cost depends on their number, not their length.

A span is `(first, stop)`, half open. Negative positions count from the prompt's end; a
span does not cross 0. This module does not import torch, because
`vllm.sampling_params` imports it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Token positions as `(first, stop)`, `stop` excluded, ascending and not adjacent.
Negative positions count from the prompt's end; a span does not cross 0. In plans that
are resolved for a request, none is negative."""

FARTHEST = 1 << 31
"""Largest distance of a position from the start or the end of the prompt."""

OPEN_END = 1 << 40
"""The `stop` of a span that extends to the end of the request."""

LAST_ROW = OPEN_END + 1
"""The `stop` of a span that extends to the end, of which only the last row counts."""

_LISTED = 64
"""Most positions that a response lists one by one."""


def spans_of(positions: Iterable[int]) -> Spans:
    """The spans of positions, which may be unordered and repeated."""
    listed = list(positions)
    if len(listed) == 1:  # As of each cell of a sweep; arrays cost ten times as much.
        return ((int(listed[0]), int(listed[0]) + 1),)
    distinct = np.unique(np.array(listed, dtype=np.int64))
    if not len(distinct):
        return ()
    apart = (np.diff(distinct) != 1) | (distinct[1:] == 0)
    first = distinct[np.concatenate(([True], apart))]
    last = distinct[np.concatenate((apart, [True]))]
    return tuple(zip(first.tolist(), (last + 1).tolist(), strict=True))


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The positions of all spans, which may touch, overlap and be unordered."""
    apart: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        last = apart[-1] if apart else None
        # Positions counted from the end of a prompt are not merged with those from its
        # start.
        if last and first <= last[1] and (first < 0) == (last[0] < 0):
            apart[-1] = last[0], max(last[1], stop)
        else:
            apart.append((first, stop))
    return tuple(apart)


def overlap(spans: Spans, start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of resolved spans that lie within `[start, stop)`."""
    return [
        (max(first, start), min(last, stop))
        for first, last in spans
        if first < stop and last > start
    ]


def contains(spans: Spans, position: int) -> bool:
    """Whether a position lies within one of the resolved spans."""
    return any(start <= position < stop for start, stop in spans)


def only_last(spans: Spans) -> bool:
    """Whether of the generated tokens' rows just the last one counts."""
    return bool(spans) and spans[-1][1] == LAST_ROW


def selected_below(spans: Spans, stop: int) -> list[tuple[int, int]]:
    """What resolved spans select of a request whose last row is at `stop - 1`."""
    found = overlap(spans, 0, stop)
    return [(stop - 1, stop)] if found and only_last(spans) else found


def absolute(spans: Spans, num_prompt: int, start: int, stop: int) -> Iterator[range]:
    """The parts of spans that lie in `[start, stop)`; they may overlap.

    Args:
        spans: the positions of one entry.
        num_prompt: number of prompt tokens.
        start: the first position.
        stop: one more than the last position.

    """
    zero = bisect_left(spans, (0, 0))
    for low, high, shift in ((0, zero, num_prompt), (zero, len(spans), 0)):
        at = bisect_right(spans, (start - shift, 1 << 62), low, high)
        for first, end in spans[max(at - 1, low) : high]:
            if first + shift >= stop:
                break
            part = range(max(first + shift, start), min(end + shift, stop))
            if part:
                yield part


def selected(spans: Spans, num_prompt: int, start: int, stop: int) -> list[int]:
    """The positions in `[start, stop)` that the spans contain, ascending."""
    parts = list(absolute(spans, num_prompt, start, stop))
    if len(parts) == 1:
        return list(parts[0])
    return sorted({position for part in parts for position in part})


def last_of(spans: Spans, num_prompt: int) -> int:
    """The last position that the spans contain, for a prompt of this length."""
    return max(
        (stop - 1 if first >= 0 else num_prompt + stop - 1) for first, stop in spans
    )


def counts_back(spans: Spans) -> bool:
    """Whether the spans are the last k tokens of a prompt."""
    return len(spans) == 1 and spans[0][1] == 0


def missed(spans: Spans, num_prompt: int, possible: range) -> int | None:
    """A position, as given, that lies outside `possible`; None if there is none.

    For a prompt of fewer than k tokens, its last k tokens are all of them.
    """
    if counts_back(spans):
        first, stop = num_prompt + spans[0][0], num_prompt
        if possible and first < possible.stop and stop > possible.start:
            return None
    for first, stop in spans:
        shift = num_prompt if first < 0 else 0
        if not possible or first + shift < possible.start:
            return first
        if stop + shift > possible.stop:
            return max(first, possible.stop - shift)
    return None


def describe_positions(spans: Spans | None) -> object:
    """Positions in the form of a response: a list, the last k, ranges, or a name."""
    if spans is None:
        return None
    if spans == NAMED["all_prompt"]:
        return "all_prompt"
    if sum(stop - first for first, stop in spans) <= _LISTED:
        return [p for first, stop in spans for p in range(first, stop)]
    if counts_back(spans):
        return {"last": -spans[0][0]}
    return {"ranges": [[first, stop - 1] for first, stop in spans]}


NAMED: dict[str, Spans | None] = {
    "all": None,
    "last_prompt": ((-1, 0),),
    "all_prompt": ((-FARTHEST, 0),),
}
"""The spans of named selectors; None: every token."""


def most_at_once(several: Iterable[Spans]) -> int:
    """The most selections that may share one token, for any length of the prompt.

    Positions counted from the start and from the end of the prompt may always meet.
    """
    ends: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for spans in several:
        for first, stop in spans:
            ends[first < 0] += [(first, 1), (stop, -1)]
    total = 0
    for of_kind in ends.values():
        depth = most = 0
        for _, change in sorted(of_kind):
            depth += change
            most = max(most, depth)
        total += most
    return total
