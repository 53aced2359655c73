# SPDX-License-Identifier: Apache-2.0
"""Where the rows of prompts are copied to: memory of each request's own.

The device copies them there by itself, and whoever gets them keeps them where they are.
The steps of a prompt that is computed in chunks fill one piece of memory, so that
nothing has to be joined, and a request that lets go of its rows frees just them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from vllm.v1.capture.plan import Ranges
from vllm.v1.capture.staging.blocks import Block, LocalGroup, Pick

LEAST_RUN = 2 << 20
"""Bytes of a request's rows at one hook point that are worth a copy of their own."""

Place: TypeAlias = tuple[torch.Tensor, int]
"""`[taps, capacity, width]` on the host, and where in it the first row goes."""

Places: TypeAlias = Mapping[tuple[str, int, int], Place]
"""By request, group and position of the first row."""


class PageSource(Protocol):
    """Gives out memory that the device can copy to."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory of this shape, if there is some."""
        ...


@dataclass(slots=True)
class Filling:
    """Memory that the next chunk of a prompt goes on in."""

    memory: torch.Tensor  # [taps, capacity, width]
    start: int
    """Token position of its first row; ..."""
    next: int
    """... of the next one; ..."""
    stop: int
    """... and after the last."""


class RequestPages:
    """The memory of prompts that are being computed. Of the engine's thread."""

    def __init__(
        self, pages: PageSource, width: int, dtype: torch.dtype, least: int = LEAST_RUN
    ) -> None:
        """Take memory from `pages` for runs of at least `least` bytes."""
        self._pages = pages
        self._width = width
        self._dtype = dtype
        self._least_rows = -(-least // (width * dtype.itemsize))
        self._prompts: dict[str, tuple[int, Sequence[Ranges]]] = {}
        """By request: the prompt's length, and what each group captures."""
        self._filling: dict[tuple[str, int], Filling] = {}

    def open(
        self, req_id: str, num_prompt_tokens: int, groups: Sequence[LocalGroup]
    ) -> None:
        """A request is captured from now on."""
        ranges = [group.ranges for group in groups]
        self._prompts[req_id] = num_prompt_tokens, ranges

    def close(self, req_id: str) -> None:
        """It is not any more; what has been filled belongs to who has it."""
        prompt = self._prompts.pop(req_id, None)
        for group in range(0 if prompt is None else len(prompt[1])):
            self._filling.pop((req_id, group), None)

    def place(self, block: Block, pick: Pick) -> Place | None:
        """Where the rows of a pick go; None if they shall go another way."""
        req_id, group, position, num_rows, _ = pick
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
        """Memory for the rest of the prompt, or for these rows alone."""
        req_id, group, position, num_rows, _ = pick
        if num_rows < self._least_rows:
            return None
        stop = position + num_rows
        for until in sorted({self._end(req_id, group, position), stop}, reverse=True):
            if until < stop:
                continue
            shape = len(block.columns), until - position, self._width
            memory = self._pages.take(shape, self._dtype)
            if memory is not None:
                return Filling(memory, position, position, until)
        return None

    def _end(self, req_id: str, group: int, position: int) -> int:
        """Up to where the prompt's rows follow each other without a gap."""
        if req_id not in self._prompts:
            return 0
        length, groups = self._prompts[req_id]
        for start, stop in groups[group]:
            if start <= position < stop:
                return min(stop, length)
        return 0


def gaps(covered: Sequence[tuple[int, int]], stop: int) -> list[tuple[int, int]]:
    """The parts of `[0, stop)` that none of the ranges covers; they do not overlap."""
    found, last = [], 0
    for first, after in sorted(covered):
        if first > last:
            found.append((last, first))
        last = after
    if last < stop:
        found.append((last, stop))
    return found
