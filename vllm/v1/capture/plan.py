# SPDX-License-Identifier: Apache-2.0
"""What a request has captured, resolved: the form that travels to the workers.

A plan is made once, at admission, from everything that asked for rows of the
request: the specs it carries and the global specs of consumers. Nothing after
admission interprets a user's input again. This module imports neither torch
nor the rest of capture, because `vllm.sampling_params` imports it.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeAlias

import msgspec

from vllm.v1.readouts.plan import ReadoutPlan

OPEN_END = 1 << 40
"""The end of a range that goes on as long as the request does."""

LIVE = "*live"
"""The reader whose rows go to the front end as steps compute them."""

READOUTS = "*readouts"
"""The reader whose rows stay on the device: its answers come with the step's output."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Token positions as disjoint, ascending ranges `[start, stop)`."""

Tap: TypeAlias = tuple[int, str]
"""`(layer, hook)`: a place where rows are read."""


def ranges_of(positions: Iterable[int]) -> Ranges:
    """The ranges that cover exactly `positions`."""
    ordered = sorted(set(positions))
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    spans = [[position for _, position in run] for _, run in runs]
    return tuple((span[0], span[-1] + 1) for span in spans)


def union(ranges: Iterable[Ranges]) -> Ranges:
    """The ranges that cover what any of `ranges` covers."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(span for spans in ranges for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def overlap(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of `ranges` that lie within `[start, stop)`."""
    return [
        (max(first, start), min(last, stop))
        for first, last in ranges
        if first < stop and last > start
    ]


def contains(ranges: Ranges, position: int) -> bool:
    """Whether `position` lies within one of `ranges`."""
    return any(start <= position < stop for start, stop in ranges)


class CaptureEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request, as the client has seen it.

    Travels to the workers with the scheduler's output, after every step that
    computed rows of the request. Only the front end knows which generated tokens
    count: it finds stop strings, and aborts come from there.
    """

    request_id: str
    reply_to: str
    token_ids: list[int]
    sample_index: int
    finish_reason: str
    instances: list[str]


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """One consumer instance that reads a group's rows at `ranges`."""

    instance: str
    ranges: Ranges


class TapGroup(msgspec.Struct, frozen=True, array_like=True):
    """Taps that are all read at the same positions, by the same readers.

    `ranges` is what is staged: what the readers want, and around it what they may
    want, where a step's positions are not known for certain when it begins.

    Grouping is what keeps a step cheap: the rows of a group are placed, copied
    and handed on as one block `[taps, rows, hidden_size]`.
    """

    taps: tuple[Tap, ...]
    ranges: Ranges
    readers: tuple[Reader, ...]


class CapturePlan(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """Everything the engine must know about the capture of one request."""

    client_request_id: str
    num_prompt_tokens: int
    groups: tuple[TapGroup, ...]
    reply_to: str
    """Where the front end that admitted the request listens for results."""
    num_samples: int = 1
    """`n` of the request; its samples run as requests of their own."""
    readouts: ReadoutPlan | None = None
    """What is answered from rows instead of handing them on."""

    @property
    def first_prompt_row(self) -> int | None:
        """The lowest prompt position that is captured, if any is.

        The prefix cache may serve only what lies below it.
        """
        starts = [
            group.ranges[0][0]
            for group in self.groups
            if group.ranges and group.ranges[0][0] < self.num_prompt_tokens
        ]
        return min(starts, default=None)

    @property
    def num_taps(self) -> int:
        """How many rows a token has at most."""
        return sum([len(group.taps) for group in self.groups])

    def rows_in(self, start: int, stop: int) -> int:
        """How many rows, over all taps, the positions `[start, stop)` have."""
        return sum(
            len(group.taps) * (last - first)
            for group in self.groups
            for first, last in overlap(group.ranges, start, stop)
        )

    @property
    def lanes(self) -> tuple[str, ...]:
        """Everyone who is handed rows of this request, sorted."""
        readers = {reader.instance for g in self.groups for reader in g.readers}
        return tuple(sorted(readers - {READOUTS}))

    @property
    def instances(self) -> tuple[str, ...]:
        """The consumer instances among them: these have results."""
        return tuple(name for name in self.lanes if name != LIVE)


def widened(ranges: Ranges, num_prompt_tokens: int, lag: int) -> Ranges:
    """The ranges of a step's assumed positions whose true ones may be in `ranges`.

    A position is assumed up to `lag` too high where drafts of the step before may
    have been rejected, which is so for generated tokens only.
    """
    return union(
        ((first, last + lag if last > num_prompt_tokens else last),)
        for first, last in ranges
    )


def group_taps(
    wanted: Mapping[str, Mapping[Tap, Ranges]],
    num_prompt_tokens: int = 0,
    lag: int = 0,
) -> tuple[TapGroup, ...]:
    """Groups that together read, once each, what every instance wants.

    Args:
        wanted: per consumer instance, the ranges it wants at each tap.
        num_prompt_tokens: of the request.
        lag: by how many tokens the scheduler may be ahead of what is true.

    """
    if len(wanted) == 1:  # As most: one reader, who wants the same at all taps.
        ((instance, taps),) = wanted.items()
        if len(alike := set(taps.values())) == 1:
            who = (Reader(instance, alike.pop()),)
            ranges = widened(who[0].ranges, num_prompt_tokens, lag)
            return (TapGroup(tuple(sorted(taps)), ranges, who),)
    readers: dict[Tap, list[Reader]] = {}
    for instance in sorted(wanted):
        for tap, ranges in wanted[instance].items():
            readers.setdefault(tap, []).append(Reader(instance, ranges))
    by_readers: dict[tuple[Reader, ...], list[Tap]] = {}
    for tap in sorted(readers):
        by_readers.setdefault(tuple(readers[tap]), []).append(tap)
    return tuple(
        TapGroup(
            tuple(taps),
            widened(union(r.ranges for r in who), num_prompt_tokens, lag),
            who,
        )
        for who, taps in by_readers.items()
    )
