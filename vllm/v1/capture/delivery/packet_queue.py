# SPDX-License-Identifier: Apache-2.0
"""The bounded queue of a sink: rows, starts and ends of requests, in order.

What does not fit is spilled to disk, waited for, or dropped and noted in the sidecars.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from msgspec.structs import replace

from vllm.v1.capture.delivery.spill import SpilledRows, SpillStore, read_back
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult


@dataclass(eq=False)
class Ending:
    """The end of a request at one instance: all its keys are complete."""

    request_id: str
    ends: Sequence[GroupEnd]
    """Those of all its keys."""
    answer: Callable[[CaptureResult], None]
    """Called once with the merged result, on the lane's thread or one of the sink."""

    @cached_property
    def finalizes(self) -> tuple[CaptureFinalize, ...]:
        """The finalize of each key; the same objects every time."""
        return tuple(
            CaptureFinalize(
                (end.request_id, layer, hook),
                {**end.sidecar, "layer": layer, "hook": hook},
            )
            for end in self.ends
            for layer, hook in end.taps
        )


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """The start of a request at an instance that needs its spec."""

    request_id: str
    pass_spec: Callable[[], object]
    """Passes the spec to the consumer."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Rows for one sink that are submitted together."""

    items: Sequence[GroupChunk]
    num_rows: int
    num_bytes: int
    spilled: Sequence[SpilledRows] | None = None
    """The items' rows on disk; then the items have empty tensors."""

    @classmethod
    def of(cls, items: Sequence[GroupChunk]) -> "Packet":
        """Create a packet; counts the rows and bytes of `items`."""
        tensors = [item.tensor for item in items]
        rows = sum([tensor.shape[:-1].numel() for tensor in tensors])
        return cls(items, rows, sum([tensor.nbytes for tensor in tensors]))

    def read(self) -> Sequence[GroupChunk]:
        """The rows, read from disk if they were spilled.

        Raises:
            OSError: they cannot be read from disk.

        """
        if self.spilled is None:
            return self.items
        return list(map(read_back, self.items, self.spilled))

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """The key of each tap of each item."""
        return tuple(key for item in self.items for key in item.keys)


Item: TypeAlias = Packet | Opening | Ending


class DroppedRows:
    """The dropped positions of each key, until its request ends.

    Used on the submitting thread only. The rows that a consumer gets are numbered
    without gaps: row offsets count delivered rows, and the sidecar lists their
    positions.
    """

    def __init__(self) -> None:
        self.positions: dict[CaptureKey, list[int]] = {}

    def note(self, items: Sequence[GroupChunk]) -> None:
        """Record rows that will not be delivered."""
        for item in items:
            for key in item.keys:
                self.positions.setdefault(key, []).extend(item.positions)

    def renumbered(self, items: Sequence[GroupChunk]) -> list[GroupChunk]:
        """The rows by key, with offsets that count delivered rows only."""
        return [
            replace(one, row_offset=one.row_offset - len(self.positions.get(key, ())))
            for item in items
            for one, key in zip(item.apart(), item.keys, strict=True)
        ]

    def settle(self, ends: Sequence[GroupEnd]) -> Sequence[GroupEnd]:
        """The ends of a request, with its dropped rows noted in the sidecars.

        Dropped rows past the end of the request are ignored.
        """
        dropped = {
            key: set(self.positions.pop(key, ())).intersection(end.sidecar["positions"])
            for end in ends
            for key in end.keys
        }
        if not any(dropped.values()):
            return ends
        count = sum(map(len, dropped.values()))
        rows = sum(len(end.sidecar["positions"]) * len(end.taps) for end in ends)
        note = (
            f"{count} of {rows} rows were dropped because the consumer was too "
            "slow (--capture-overload-policy drop)"
        )
        return [
            replace(
                end,
                taps=(tap,),
                sidecar=_without(end.sidecar, lost, note) if lost else end.sidecar,
            )
            for end in ends
            for tap, key in zip(end.taps, end.keys, strict=True)
            for lost in [dropped[key]]
        ]


def _without(sidecar: dict[str, Any], dropped: set[int], note: str) -> dict[str, Any]:
    """`sidecar` without the dropped positions, and with `note`."""
    kept = [
        (position, token)
        for position, token in zip(sidecar["positions"], sidecar["token_ids"])
        if position not in dropped
    ]
    earlier = sidecar.get("capture_note")
    return sidecar | {
        "positions": [position for position, _ in kept],
        "token_ids": [token for _, token in kept],
        "num_rows": len(kept),
        "dropped_rows": len(sidecar["positions"]) - len(kept),
        "capture_note": note if earlier is None else f"{earlier}; {note}",
    }


class PacketQueue:
    """A FIFO queue of packets, openings and endings.

    One thread offers packets, one takes items, and any may add openings and endings.

    The bounds apply to packets in memory, including the one that is being processed,
    which stays in the queue until `pop`. A packet that does not fit can be spilled to
    disk and keeps its place in the order. Openings and endings hold no rows and are
    always accepted.
    """

    def __init__(
        self, max_bytes: int, max_packets: int, spill: SpillStore | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._max_packets = max_packets
        self._spill = spill
        self._items: deque[Item] = deque()
        self._packets = 0
        self.num_bytes = 0
        """Bytes of rows queued in memory."""
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows queued on disk."""
        packets = [item for item in list(self._items) if isinstance(item, Packet)]
        return sum(one.num_bytes for one in packets if one.spilled is not None)

    def offer(self, packet: Packet) -> Packet | None:
        """Append a packet if there is room in memory or on disk.

        Returns:
            The packet in the form in which it was queued; None if there is no room.

        """
        with self._changed:
            if self._fits(packet):
                self._packets += 1
                self.num_bytes += packet.num_bytes
                self._append(packet)
                return packet
        if self._spill is None:
            return None
        rows = self._spill.write(packet.items)
        if rows is None:
            return None
        bare = [replace(i, tensor=i.tensor.new_empty(0)) for i in packet.items]
        packet = Packet(bare, packet.num_rows, packet.num_bytes, rows)
        with self._changed:
            self._append(packet)
        return packet

    def wait_for_room(self, packet: Packet) -> None:
        """Wait until `packet` fits in memory, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(packet), 1.0)

    def mark(self, mark: Opening | Ending) -> None:
        """Append the start or end of a request."""
        with self._changed:
            self._append(mark)

    def head(self) -> Item | None:
        """Wait for the oldest item, which stays queued; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return self._items[0] if self._items else None

    def pop(self, item: Item) -> None:
        """Remove the oldest item, `item`, after it was processed."""
        with self._changed:
            if self._items and self._items[0] is item:
                self._items.popleft()
            self._forget(item)

    def discard_packets(self) -> list[Packet]:
        """Remove and return all packets except the oldest item, which is in process."""
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
        """The ends that are queued or being processed."""
        with self._changed:
            return [item for item in self._items if isinstance(item, Ending)]

    def waiting_rows(self) -> int:
        """The number of rows queued in memory and on disk."""
        with self._changed:
            return sum(
                item.num_rows for item in self._items if isinstance(item, Packet)
            )

    def close(self) -> None:
        """Let `head` return None once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, packet: Packet) -> bool:
        return not self._packets or (
            self.num_bytes + packet.num_bytes <= self._max_bytes
            and self._packets < self._max_packets
        )

    def _append(self, item: Item) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def _forget(self, item: Item) -> None:
        if isinstance(item, Packet) and item.spilled is None:
            self._packets -= 1
            self.num_bytes -= item.num_bytes
        self._changed.notify_all()
