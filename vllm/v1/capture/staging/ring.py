# SPDX-License-Identifier: Apache-2.0
"""Staging memory: a ring of rows on the device and one of equal size on the host.

CUDA graphs write rows into one persistent tensor on the device. A step owns a segment
of it from the assignment of its slots until its rows were gathered on the host.
Segments are reserved and released in order, as in a ring buffer, so that a step can run
while the rows of earlier steps are copied. On a CPU the two rings are the same memory.
If a single consumer takes the rows, it may have them encoded before they are copied.

Rows are copied once more from the host ring to their requests. For steps with many rows
this is too slow, so the rows of prompts are copied to pages instead, which consumers
receive as they are.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm._custom_ops import swap_blocks_batch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.pinned import Pages, pin
from vllm.v1.capture.sink import RowEncoder
from vllm.v1.capture.staging.request_pages import Place, Places, RequestPages, gaps
from vllm.v1.residual.row_blocks import Block


class Segment(NamedTuple):
    """The staging rows `[start, start + num_rows)` of one step."""

    start: int
    num_rows: int


class RowRing:
    """Allocates segments of `[0, num_rows)` in ring order.

    `reserve` is called on the engine's thread and blocks while there is no room,
    `release` on the dispatch thread.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._taken: deque[Segment] = deque()
        self._changed = threading.Condition()

    def reserve(self, num_rows: int, timeout: float | None = None) -> Segment | None:
        """Reserve the next segment.

        Args:
            num_rows: size of the segment.
            timeout: seconds to wait for room; None waits without limit.

        Returns:
            The segment; None if there was no room in time.

        """
        assert 0 < num_rows <= self.num_rows, (
            f"a step wants {num_rows} rows of staging memory that has {self.num_rows}"
        )
        with self._changed:
            self._changed.wait_for(lambda: self._place(num_rows) is not None, timeout)
            start = self._place(num_rows)
            if start is None:
                return None
            segment = Segment(start, num_rows)
            self._taken.append(segment)
            return segment

    def release(self, *segments: Segment) -> None:
        """Release segments, which must be the oldest reserved ones, in order."""
        with self._changed:
            for segment in segments:
                oldest = self._taken.popleft()
                assert oldest == segment, f"released {segment}, the oldest is {oldest}"
            self._changed.notify_all()

    def give_back(self, segment: Segment) -> None:
        """Undo the last `reserve`, on the engine's thread."""
        with self._changed:
            newest = self._taken.pop()
            assert newest == segment, f"given back {segment}, the newest is {newest}"

    def in_the_way(self, num_rows: int) -> set[Segment]:
        """The oldest segments, which must be released for a segment of this size."""
        with self._changed:
            taken, oldest = self._taken.copy(), set[Segment]()
        while self._place(num_rows, taken) is None:
            oldest.add(taken.popleft())
        return oldest

    def _place(self, num_rows: int, taken: deque[Segment] | None = None) -> int | None:
        taken = self._taken if taken is None else taken
        if not taken:
            return 0
        tail = taken[0].start
        head = taken[-1].start + taken[-1].num_rows
        if taken[-1].start >= tail:  # free: [head, end) and [0, tail)
            if head + num_rows <= self.num_rows:
                return head
            return 0 if num_rows <= tail else None
        return head if head + num_rows <= tail else None


PINNED_SHARE = 0.75
"""Share of the host memory budget for pinned pages; the rest is for other rows."""
AHEAD_BYTES = 4 << 30
"""Bytes that are pinned at the start and kept free for later prompts."""
PAGE_BYTES = 8 << 20
"""A step with fewer bytes is copied to the host ring as a whole."""
PIECE_BYTES = 16 << 20
"""Approximate maximum bytes that are copied to the host at a time.

Other copies, such as that of sampled tokens, then wait for one piece at most instead of
all rows of a prompt.
"""


class Copy(NamedTuple):
    """Rows to copy, of one or more taps; those of a tap are contiguous."""

    taps: Sequence[int]
    """The number of each tap."""
    host: torch.Tensor  # [taps, rows, width]
    device: torch.Tensor  # [taps, rows, width], another width if they are encoded

    def between(self, start: int, stop: int) -> "Copy":
        """The copy of these rows of each tap."""
        return Copy(self.taps, self.host[:, start:stop], self.device[:, start:stop])


OfTaps: TypeAlias = tuple[Copy, list[int]]
"""A copy, and for which of its taps, by their index in it."""
Piece: TypeAlias = tuple[int, int, int, torch.Tensor | None]
"""Where a piece is copied from and to, its bytes, and what must live until then."""
Pick: TypeAlias = tuple[npt.NDArray[np.int64], int]
"""Staging rows, and the row of the host ring to which the first of them is copied."""
Parts: TypeAlias = Sequence[tuple[Collection[int], torch.cuda.Event]]
"""Taps, by number, and the event after which their rows are in staging memory."""
EVERY_TAP = -1
"""In place of a tap's number, for rows of all of them."""


class Staging:
    """Staging memory on device and host, and the copies between them.

    The engine's thread reserves segments and calls `to_host` or `to_pages`; copies run
    on a CUDA stream of their own. The dispatch thread waits for the copies, reads
    `host_rows` and releases the segments.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch_rows: int = 0,
        encoder: RowEncoder | None = None,
    ) -> None:
        """Allocate the memory.

        Args:
            num_rows: size of the ring.
            width: values per row.
            dtype: of the rows.
            device: the device of the model.
            scratch_rows: additional rows for steps whose rows only readouts use.
            encoder: encodes rows before they are copied to the host; by default they
                are copied as they are.

        """
        self.ring = RowRing(num_rows)
        # Persistent, as CUDA graphs hold the address: allocated once, never replaced.
        self.rows = torch.empty(
            num_rows + scratch_rows, width, dtype=dtype, device=device
        )
        self.scratch = num_rows
        """The first of the scratch rows, which never leave the device."""
        self._encoder = encoder
        self._piece_rows = max(PIECE_BYTES // (width * dtype.itemsize), 1)
        if encoder is not None:
            width, dtype = encoder.width, encoder.dtype
        row_bytes = width * dtype.itemsize
        self._page_rows = PAGE_BYTES // row_bytes
        self._stream: torch.cuda.Stream | None = None
        self._pages: Pages | None = None
        """Memory for the rows of prompts, on a GPU."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            if num_rows // 2 >= self._page_rows:
                self._pages = pinned_pages(num_rows // 2 * row_bytes, device)
            memory = np.zeros((num_rows, row_bytes), dtype=np.uint8)
            BUDGET.claim("staging", memory.nbytes)
            pin(memory, device)
            self.host_rows = torch.from_numpy(memory).view(dtype)
        elif encoder is not None:
            self.host_rows = torch.empty(num_rows, width, dtype=dtype)
        else:
            self.host_rows = self.rows
        self.requests = (
            None if self._pages is None else RequestPages(self._pages, width, dtype)
        )
        """The pages of prompts that are being computed, if there are pages."""

    def to_host(self, segments: Sequence[Segment]) -> torch.cuda.Event | None:
        """Start copying segments to the host ring, after the queued forward pass.

        Returns:
            The event to wait for; None if the rows are on the host already.

        """
        pieces = spans([segment for segment in segments if segment.num_rows])
        if self.host_rows is self.rows or not pieces:
            return None
        return self._copy(
            [
                Copy([EVERY_TAP], self.host_rows[None, span], self.rows[None, span])
                for span in pieces
            ]
        )

    def pick_to_host(self, picks: Sequence[Pick]) -> torch.cuda.Event | None:
        """Start copying single rows to the host ring, side by side; as `to_host`."""
        if self.host_rows is self.rows or not picks:
            return None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for index, first in picks:
                for at in range(0, len(index), self._piece_rows):
                    some = index[at : at + self._piece_rows]
                    rows = self.rows[async_tensor_h2d(some, device=self.rows.device)]
                    host = self.host_rows[first + at : first + at + len(some)]
                    host.copy_(self._encoded(rows), non_blocking=True)
        return None if self._stream is None else self._copied()

    def _of_block(self, block: Block, base: int) -> Copy:
        """The copy of a block, whose first row is `base`, to the host ring."""
        shape = len(block.columns), block.num_rows * block.each
        rows = slice(base, base + block.num_staged)
        host, device = self.host_rows[rows], self.rows[rows]
        return Copy(block.columns, host.unflatten(0, shape), device.unflatten(0, shape))

    def is_large(self, num_rows: int) -> bool:
        """Whether the rows of a step of this size go to pages, if there are some."""
        return self.requests is not None and num_rows >= self._page_rows

    def to_pages(
        self, segment: Segment, blocks: Sequence[Block], parts: Parts = ()
    ) -> tuple[Places, torch.cuda.Event | None] | None:
        """Start copying a large segment, with rows of prompts going to pages.

        The other rows go to the host ring.

        Args:
            segment: of the step.
            blocks: those of the step's layout whose rows are copied.
            parts: of the taps, in the order in which their rows are computed; the rows
                of others are copied after the queued forward pass.

        Returns:
            The places of the rows in pages, and the event to wait for. None if nothing
            was copied, because the segment is small or no page is free.

        """
        if self.requests is None or not self.is_large(segment.num_rows):
            return None
        if not any([block.picks for block in blocks]):  # Nothing of a prompt.
            return None
        places: dict[tuple[str, int, int], Place] = {}
        copies: list[Copy] = []
        base = segment.start
        for block in blocks:
            whole, num_rows = self._of_block(block, base), block.num_rows * block.each
            base += block.num_staged
            covered = []
            # Pages are for rows as wide as the stream.
            picks = () if block.width else block.picks
            for pick, offset in zip(picks, block.offsets):
                place = self.requests.place(block, pick)
                if place is not None:
                    places[pick[:3]] = place
                    (memory, first), count = place, pick[3]
                    covered.append((offset, offset + count))
                    target = memory[:, first : first + count]
                    source = whole.device[:, offset : offset + count]
                    copies.append(Copy(block.columns, target, source))
            copies += [whole.between(*gap) for gap in gaps(covered, num_rows)]
        return (places, self._copy(copies, parts)) if places else None

    def trim(self) -> None:
        """Return pages to the system that were unused since the last call."""
        if self._pages is not None:
            self._pages.trim()

    def close(self) -> None:
        """Stop pinning memory ahead; rows in it stay."""
        if self._pages is not None:
            self._pages.close()

    def _copy(
        self, copies: Sequence[Copy], parts: Parts = ()
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            for copy in copies:
                if copy.host.data_ptr() != copy.device.data_ptr():
                    for host, device in zip(copy.host, copy.device):
                        host.copy_(self._encoded(device))
            return None
        after = torch.cuda.current_stream().record_event()
        for ready, own in in_order(copies, parts):
            self._stream.wait_event(after if ready is None else ready)
            with torch.cuda.stream(self._stream):
                for some in batches(self._pieces(own)):
                    numbers = [piece[:3] for piece in some]
                    swap_blocks_batch(*torch.tensor(list(zip(*numbers))))
        return self._copied()

    def _copied(self) -> torch.cuda.Event:
        """The event after which all that was started so far is on the host."""
        # Blocking: the dispatch thread must not spin on the driver's lock.
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        return done

    def _pieces(self, copies: Sequence[OfTaps]) -> Iterator[Piece]:
        """Split copies into pieces of at most `PIECE_BYTES`."""
        for (_, host, device), taps in copies:
            to, to_tap, to_row = addresses(host)
            of, of_tap, of_row = addresses(device)
            rows = range(0, host.shape[1], self._piece_rows)
            for tap, row in product(taps, rows):
                count = min(self._piece_rows, host.shape[1] - row)
                source, encoded = of + tap * of_tap + row * of_row, None
                if self._encoder is not None:
                    encoded = self._encoder.encode(device[tap, row : row + count])
                    source = encoded.data_ptr()
                yield source, to + tap * to_tap + row * to_row, count * to_row, encoded

    def _encoded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._encoder is None else self._encoder.encode(rows)


def pinned_pages(slab_bytes: int, device: torch.device) -> Pages:
    """Pinned pages for the rows of prompts, within the host memory budget.

    Args:
        slab_bytes: size of the slabs that pages are cut from.
        device: the device that copies to them.

    """
    most = int(BUDGET.limit * PINNED_SHARE)
    slab = min(slab_bytes, most)
    return Pages(slab, most, partial(pin, device=device), AHEAD_BYTES)


def in_order(
    copies: Sequence[Copy], parts: Parts
) -> Iterator[tuple["torch.cuda.Event | None", list[OfTaps]]]:
    """The copies of each part with its event; those of other taps last, with None."""
    part_of = {tap: number for number, (taps, _) in enumerate(parts) for tap in taps}
    found: list[list[OfTaps]] = [[] for _ in range(len(parts) + 1)]
    for copy in copies:
        own: dict[int, list[int]] = {}
        for index, tap in enumerate(copy.taps):
            own.setdefault(part_of.get(tap, len(parts)), []).append(index)
        for part, indices in own.items():
            found[part].append((copy, indices))
    for (_, ready), of_part in zip(parts, found):
        if of_part:
            yield ready, of_part
    if found[-1]:
        yield None, found[-1]


def addresses(rows: torch.Tensor) -> tuple[int, int, int]:
    """The address of rows `[taps, rows, width]`, and strides in bytes of taps and rows.

    Views of them would take several times as long.
    """
    taps, row, _ = rows.stride()
    return rows.data_ptr(), taps * rows.itemsize, row * rows.itemsize


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in groups of `PIECE_BYTES` and one piece at most.

    One call of the driver queues a group. With a call of torch for each, a step with
    the prompts of 49 requests at 32 taps kept the engine's thread busy for 45 ms.
    """
    some: list[Piece] = []
    total = 0
    for piece in pieces:
        some.append(piece)
        total += piece[2]
        if total >= PIECE_BYTES:
            yield some
            some, total = [], 0
    if some:
        yield some


def spans(segments: Sequence[Segment]) -> list[slice]:
    """The rows of `segments` as slices, with adjacent segments merged."""
    pieces: list[slice] = []
    for segment in segments:
        stop = segment.start + segment.num_rows
        if pieces and pieces[-1].stop == segment.start:
            pieces[-1] = slice(pieces[-1].start, stop)
        else:
            pieces.append(slice(segment.start, stop))
    return pieces
