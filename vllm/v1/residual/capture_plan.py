# SPDX-License-Identifier: Apache-2.0
"""The resolved capture plan of a request, in the form that is sent to the workers.

A plan is made once, at admission, from the specs that the request carries and the
global specs of consumers. Nothing after admission interprets user input again. This
module does not import torch, because `vllm.sampling_params` imports it.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from vllm.v1.residual.readout_plan import ReadoutPlan, ReadoutRows
from vllm.v1.residual.spans import Spans, merged, overlap, selected_below
from vllm.v1.residual.tap import AFTER, Tap, in_front

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LIVE = "*live"
"""Name of the reader whose rows go to the front end after each step."""

READOUTS = "*readouts"
"""Name of the reader whose rows stay on the device.

What is computed from them is returned with the output of the step.
"""


class CaptureEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request (one sample), as its client sees it.

    Sent to the workers with a scheduler output, after all steps that computed rows of
    the request. Only the front end knows which generated tokens the output holds: it
    detects stop strings and issues aborts.
    """

    request_id: str
    reply_to: str
    token_ids: list[int]
    sample_index: int
    finish_reason: str
    instances: list[str]
    readouts: list[ReadoutRows] = []
    """The results of readouts that consumers take."""
    kept: dict[str, Spans] = {}
    """The positions whose rows are kept, by instance with `keep_when`."""
    error: str | None = None
    """Why the whole capture failed in a worker, if it did."""


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """A consumer instance, and the positions at which it reads the rows of a group."""

    instance: str
    ranges: Spans
    after: bool = False
    """Whether it names the taps by those in front, as of `tap.in_front`."""
    heads: tuple[int, ...] = ()
    """The heads whose part of a row it gets, in this order; empty for all of it."""
    head_size: int = 0
    """Numbers per head, if `heads` are given."""

    def named(self, taps: Sequence[Tap]) -> tuple[Tap, ...]:
        """The names of taps of its group, under which it gets their rows."""
        return tuple([in_front(tap) for tap in taps] if self.after else taps)


class TapGroup(msgspec.Struct, frozen=True, array_like=True):
    """Taps of one width that the same readers read at the same positions.

    `ranges` are the positions that are staged: the union of the readers' ranges,
    widened if the true positions of a step are unknown when it starts (see `widened`).

    The rows of a group are staged, copied and delivered as one block
    `[taps, rows, hidden_size]`, which keeps the cost per step low.
    """

    taps: tuple[Tap, ...]
    ranges: Spans
    readers: tuple[Reader, ...]
    each: int = 1
    """Staging rows that a row takes."""
    width: int = 0
    """Numbers per row, if other than in the stream."""


class CapturePlan(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """What is captured of one request, and for whom."""

    client_request_id: str
    num_prompt_tokens: int
    groups: tuple[TapGroup, ...]
    reply_to: str
    """ZMQ address at which the front end that admitted the request takes results."""
    num_samples: int = 1
    """`n` of the request; each sample runs as a separate engine request."""
    readouts: ReadoutPlan | None = None
    """What is computed on the device from rows, which are not delivered."""

    @property
    def first_prompt_row(self) -> int | None:
        """The lowest captured prompt position; None if no prompt token is captured.

        Only positions below it may come from the prefix cache.
        """
        starts = [
            group.ranges[0][0]
            for group in self.groups
            if group.ranges and group.ranges[0][0] < self.num_prompt_tokens
        ]
        return min(starts, default=None)

    @property
    def num_taps(self) -> int:
        """The maximum number of staging rows per token."""
        return sum([len(group.taps) * group.each for group in self.groups])

    def rows_in(self, start: int, stop: int) -> int:
        """The staging rows, over all taps, of the positions `[start, stop)`."""
        return sum(
            len(group.taps) * group.each * (last - first)
            for group in self.groups
            for first, last in overlap(group.ranges, start, stop)
        )

    def kept_rows(self, instance: str, kept: Spans, stop: int) -> int:
        """The rows of an instance below `stop`, over all taps, at some positions."""
        return sum(
            len(group.taps) * (last - first)
            for group in self.groups
            for reader in group.readers
            if reader.instance == instance
            for span in selected_below(reader.ranges, stop)
            for first, last in overlap(kept, *span)
        )

    @property
    def keeping(self) -> frozenset[str]:
        """The instances with `keep_when`, whose rows wait for the request's end."""
        keeps = () if self.readouts is None else self.readouts.keep_when
        return frozenset(keep.instance for keep in keeps)

    @property
    def keeping_tokens(self) -> frozenset[str]:
        """Those of them that keep rows around tokens, not all rows of the request."""
        keeps = () if self.readouts is None else self.readouts.keep_when
        return frozenset(keep.instance for keep in keeps if keep.scope == "token")

    @property
    def wait(self) -> int:
        """The tokens behind a row until it is known whether the row is kept."""
        keeps = () if self.readouts is None else self.readouts.keep_when
        return max([keep.before for keep in keeps], default=0)

    @property
    def row_lanes(self) -> tuple[str, ...]:
        """Names of all readers that rows are delivered to (not `READOUTS`), sorted."""
        readers = {reader.instance for g in self.groups for reader in g.readers}
        return tuple(sorted(readers - {READOUTS}))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of all readers of rows, and of results of readouts, sorted."""
        if self.readouts is None or not self.readouts.readers:
            return self.row_lanes
        results = {reader.instance for reader in self.readouts.readers}
        return tuple(sorted(results.union(self.row_lanes)))

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of the consumer instances, each of which returns a result."""
        return tuple(name for name in self.lanes if name != LIVE)


def scheduling_lag(vllm_config: "VllmConfig") -> int:
    """By how many tokens the scheduler's positions may be too high.

    An asynchronous scheduler prepares a step before it knows how many draft tokens of
    the previous steps (one per pipeline stage) are rejected, and assumes none.
    """
    drafts: int = vllm_config.num_speculative_tokens
    if not vllm_config.scheduler_config.async_scheduling:
        return 0
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return drafts * stages


def widened(ranges: Spans, num_prompt_tokens: int, lag: int) -> Spans:
    """The assumed positions of a step whose true positions may lie in `ranges`.

    The scheduler assumes that all draft tokens of the previous step are accepted. If
    some are rejected, the assumed positions of generated tokens are up to `lag` too
    high. Positions of prompt tokens are exact.
    """
    return merged(
        (first, last + lag if last > num_prompt_tokens else last)
        for first, last in ranges
    )


def _order(tap: Tap) -> tuple[int, bool, str]:
    """The order of taps in a group, in which `in_front` keeps layers ascending."""
    return tap[0], tap[1].endswith(AFTER), tap[1]


def group_taps(
    wanted: Mapping[str, Mapping[Tap, Spans]],
    num_prompt_tokens: int = 0,
    lag: int = 0,
    widths: Mapping[Tap, tuple[int, int]] | None = None,
    after: Collection[str] = (),
    heads: Mapping[tuple[str, Tap], tuple[tuple[int, ...], int]] | None = None,
) -> tuple[TapGroup, ...]:
    """Group taps by readers and width, so that each wanted row is staged exactly once.

    Args:
        wanted: per consumer instance, the ranges that it reads at each tap.
        num_prompt_tokens: of the request.
        lag: by how many tokens the scheduler's positions may be too high; see
            `widened`.
        widths: `each` and `width` of a `TapGroup`, for taps whose rows are not as wide
            as the stream.
        after: the instances that read behind what is done at the taps they name.
        heads: `heads` and `head_size` of a `Reader`, by instance and tap.

    """
    widths, heads = widths or {}, heads or {}
    readers: dict[Tap, list[Reader]] = {}
    for instance in sorted(wanted):
        for tap, ranges in wanted[instance].items():
            some = heads.get((instance, tap), ((), 0))
            reader = Reader(instance, ranges, instance in after, *some)
            readers.setdefault(tap, []).append(reader)
    alike_taps: dict[tuple[tuple[Reader, ...], tuple[int, int]], list[Tap]] = {}
    for tap in sorted(readers, key=_order):
        kind = _needed(readers[tap]), widths.get(tap, (1, 0))
        alike_taps.setdefault(kind, []).append(tap)
    return tuple(
        TapGroup(
            tuple(taps),
            widened(
                merged(chain(*[reader.ranges for reader in group])),
                num_prompt_tokens,
                lag,
            ),
            group,
            *size,
        )
        for (group, size), taps in alike_taps.items()
    )


def _needed(readers: Sequence[Reader]) -> tuple[Reader, ...]:
    """The readers of a tap, without `READOUTS` if others read the same rows.

    It only has rows staged. Without it the tap is of the same group as those that no
    readout reads, and a request has one group instead of two.
    """
    others = [one for one in readers if one.instance != READOUTS]
    if others and len(others) < len(readers):
        (staged,) = [one.ranges for one in readers if one.instance == READOUTS]
        read = merged(chain(*[one.ranges for one in others]))
        if all(overlap(read, *span) == [span] for span in staged):
            return tuple(others)
    return tuple(readers)
