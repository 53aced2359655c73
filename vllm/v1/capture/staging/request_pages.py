# SPDX-License-Identifier: Apache-2.0
"""Pages: host memory per request, to which the rows of long prompts are copied.

The device copies rows directly into the pages, and consumers keep them without a
further copy. All chunks of a chunked prefill go to the same page, so nothing needs to
be joined, and the rows of a request can be freed independently of others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from vllm.v1.residual.row_blocks import Block, LocalGroup, Pick
from vllm.v1.residual.spans import Spans

LEAST_RUN = 512 << 10
"""Bytes of a page per tap from which on a page pays off."""

Place: TypeAlias = tuple[torch.Tensor, int]
"""A page `[taps, capacity, width]` on the host, and the index of the first row."""

Places: TypeAlias = Mapping[tuple[str, int, int], Place]
"""By request, group and position of the first row."""


class PageSource(Protocol):
    """Allocates memory that the device can copy to."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of this shape; None if there is no memory."""
        ...


@dataclass(slots=True)
class Filling:
    """A page with room for the next chunk of a prompt."""

    memory: torch.Tensor  # [taps, capacity, width]
    start: int
    """Token position of the page's first row."""
    next: int
    """Token position of the next row to copy."""
    stop: int
    """Token position after the page's last row."""


class RequestPages:
    """The pages of prompts that are being computed; for the engine's thread only."""

    def __init__(
        self, pages: PageSource, width: int, dtype: torch.dtype, least: int = LEAST_RUN
    ) -> None:
        """Start without requests.

        Args:
            pages: allocates the memory.
            width: values per row.
            dtype: of the rows.
            least: bytes per tap below which there is no page.

        """
        self._pages = pages
        self._width = width
        self._dtype = dtype
        self._least_rows = -(-least // (width * dtype.itemsize))
        self._prompts: dict[str, tuple[int, Sequence[Spans]]] = {}
        """By request: the prompt's length, and the ranges of each group."""
        self._filling: dict[tuple[str, int], Filling] = {}

    def open(
        self, req_id: str, num_prompt_tokens: int, groups: Sequence[LocalGroup]
    ) -> None:
        """Register a captured request."""
        ranges = [group.ranges for group in groups]
        self._prompts[req_id] = num_prompt_tokens, ranges

    def close(self, req_id: str) -> None:
        """Remove a request; pages that were filled stay with their holders."""
        prompt = self._prompts.pop(req_id, None)
        for group in range(0 if prompt is None else len(prompt[1])):
            self._filling.pop((req_id, group), None)

    def place(self, block: Block, pick: Pick) -> Place | None:
        """The page for the rows of a pick; None if they go through the host ring."""
        req_id, group, position, num_rows, _ = pick
        if req_id not in self._prompts:
            return None  # Only readouts read its rows, or it has ended.
        filling = self._filling.pop((req_id, group), None)
        if filling is None or not (
            filling.next == position and position + num_rows <= filling.stop
        ):
            filling = self._begin(block, pick)
        if filling is None:
            return None
        first = filling.next - filling.start
        filling.next += num_rows
        if filling.next < filling.stop:
            self._filling[req_id, group] = filling
        return filling.memory, first

    def _begin(self, block: Block, pick: Pick) -> Filling | None:
        """A page for the rest of the prompt or, failing that, for these rows.

        The first rows of a long prompt get one however few they are. Otherwise all of
        its rows would have to be copied to be joined with them.
        """
        req_id, group, position, num_rows, _ = pick
        stop = position + num_rows
        for until in sorted({self._end(req_id, group, position), stop}, reverse=True):
            if until < stop or until - position < self._least_rows:
                continue
            shape = len(block.columns), until - position, self._width
            memory = self._pages.take(shape, self._dtype)
            if memory is not None:
                return Filling(memory, position, position, until)
        return None

    def _end(self, req_id: str, group: int, position: int) -> int:
        """The end of the captured range of prompt tokens that contains `position`."""
        length, groups = self._prompts[req_id]
        for start, stop in groups[group]:
            if start <= position < stop:
                return min(stop, length)
        return 0


def gaps(covered: Sequence[tuple[int, int]], stop: int) -> list[tuple[int, int]]:
    """The parts of `[0, stop)` that are in none of the disjoint ranges `covered`."""
    found, last = [], 0
    for first, after in sorted(covered):
        if first > last:
            found.append((last, first))
        last = after
    if last < stop:
        found.append((last, stop))
    return found
