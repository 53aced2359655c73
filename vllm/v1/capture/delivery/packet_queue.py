# SPDX-License-Identifier: Apache-2.0
"""What waits for one sink: rows and ends of requests, in order, within bounds."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm.v1.capture.delivery.spill import SpilledPacket, SpillStore
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """All streams of a request at one instance are complete."""

    request_id: str
    finalizes: tuple[CaptureFinalize, ...]
    answer: Callable[[CaptureResult], None]
    """Called on the lane's thread with the merged result."""


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """Rows of a request will follow, if it captures anything at this instance."""

    request_id: str
    tell: Callable[[], object]
    """Tells the consumer what the request says."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Chunks that a step produced for one sink, in memory."""

    chunks: Sequence[CaptureChunk]
    num_rows: int
    num_bytes: int

    @classmethod
    def of(cls, chunks: Sequence[CaptureChunk]) -> "Packet":
        """The packet of `chunks`."""
        tensors = [chunk.tensor for chunk in chunks]
        rows = sum(tensor.shape[0] for tensor in tensors)
        return cls(chunks, rows, sum(tensor.nbytes for tensor in tensors))

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """The keys that the chunks belong to."""
        return tuple(chunk.key for chunk in self.chunks)


Item: TypeAlias = Packet | SpilledPacket | Opening | Ending


class PacketQueue:
    """Packets and endings in the order in which they came.

    One thread puts, one takes. The bounds count what is in memory, including the
    item that is being worked on: it keeps its place until `pop`. What does not
    fit may lie on disk instead, at the same place in the order. A request's
    beginning and end hold no rows and are always taken.
    """

    def __init__(
        self, max_bytes: int, max_packets: int, spill: SpillStore | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._max_packets = max_packets
        self._spill = spill
        self._items: deque[Item] = deque()
        self._packets = 0
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows that wait in memory."""
        return self._bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows that wait on disk."""
        items = list(self._items)
        return sum(i.num_bytes for i in items if isinstance(i, SpilledPacket))

    def offer(self, packet: Packet) -> Packet | SpilledPacket | None:
        """Take `packet` if there is room; the form it was taken in, else None."""
        with self._changed:
            if self._fits(packet):
                self._packets += 1
                self._bytes += packet.num_bytes
                self._append(packet)
                return packet
        if self._spill is None:
            return None
        spilled = self._spill.write(packet.chunks, packet.num_rows, packet.num_bytes)
        if spilled is not None:
            with self._changed:
                self._append(spilled)
        return spilled

    def wait_for_room(self, packet: Packet, timeout: float) -> None:
        """Wait until `packet` may fit in memory, or until the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(packet), timeout)

    def mark(self, mark: Opening | Ending) -> None:
        """Take a request's beginning or end."""
        with self._changed:
            self._append(mark)

    def head(self) -> Item | None:
        """The oldest item, which stays; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return self._items[0] if self._items else None

    def pop(self, item: Item) -> None:
        """The oldest item, `item`, is done, unless it was discarded meanwhile."""
        with self._changed:
            if self._items and self._items[0] is item:
                self._items.popleft()
            self._forget(item)

    def discard_packets(self) -> list[Packet | SpilledPacket]:
        """Remove all rows but the oldest item, which is being worked on."""
        with self._changed:
            kept, lost = deque(list(self._items)[:1]), []
            for item in list(self._items)[1:]:
                if isinstance(item, Opening | Ending):
                    kept.append(item)
                else:
                    lost.append(item)
                    self._forget(item)
            self._items = kept
            return lost

    def endings(self) -> list[Ending]:
        """The requests whose ends wait, or are being worked on."""
        with self._changed:
            return [item for item in self._items if isinstance(item, Ending)]

    def waiting_rows(self) -> int:
        """How many rows wait, in memory and on disk."""
        with self._changed:
            return sum(
                item.num_rows
                for item in self._items
                if not isinstance(item, Opening | Ending)
            )

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def read(self, packet: Packet | SpilledPacket) -> Sequence[CaptureChunk]:
        """The packet's chunks.

        Raises:
            OSError: they lay on disk and are gone.

        """
        if isinstance(packet, Packet):
            return packet.chunks
        assert self._spill is not None, "a packet lies on disk, but no disk is used"
        return self._spill.read(packet)

    def _fits(self, packet: Packet) -> bool:
        return not self._packets or (
            self._bytes + packet.num_bytes <= self._max_bytes
            and self._packets < self._max_packets
        )

    def _append(self, item: Item) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def _forget(self, item: Item) -> None:
        if isinstance(item, Packet):
            self._packets -= 1
            self._bytes -= item.num_bytes
        elif isinstance(item, SpilledPacket):
            assert self._spill is not None, "a packet lies on disk, but none is used"
            self._spill.release(item)
        self._changed.notify_all()
