# SPDX-License-Identifier: Apache-2.0
"""The activation store, as the scheduler knows it: which rows of which blocks it has.

Tokens from the prefix cache are not computed, so they have no rows, and a capture of a
prompt ends the reuse of cached blocks at its first row. With a store the rows of a
block lie beside its keys and values: reuse goes on for as long as the store has the
rows of each block at all captured taps. A block is known by its hash, which names all
that its rows depend on: the tokens before it, the adapter, what steers them, and loads
of weights.

All is decided here, on the engine core's thread; the workers have the rows, and do what
`vllm.v1.residual.capture_step` says. Only whole blocks of prompts are stored. What is
not used for longest leaves the memory first.

Gain (`benchmarks/again.py`, 8B class, H200): of the time of eight prompts of 2,048
tokens 0.81 at one layer, 0.31 at all. What it costs is in `benchmarks/NOTES.md`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from vllm.utils.math_utils import cdiv
from vllm.v1.residual.capture_plan import READOUTS, CapturePlan
from vllm.v1.residual.capture_step import (
    KeepRows,
    LoadRows,
    MoveRows,
    Place,
    StoreChange,
)
from vllm.v1.residual.spans import OPEN_END, Spans, overlap
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

Taps: TypeAlias = frozenset[Tap]


@dataclass(slots=True, eq=False)
class Stored:
    """The rows of one block at some taps."""

    number: int
    block: "BlockHash"
    taps: Taps
    num_bytes: int
    ready: bool = False
    """Whether steps were scheduled that compute all its rows."""


@dataclass(slots=True)
class Captured:
    """A request whose rows may come from the store."""

    request: "Request"
    first: int
    """The lowest captured position of the prompt."""
    most: int
    """The position from which on the prompt must be computed, for readouts."""
    whole: int
    """Number of whole blocks of the prompt."""
    groups: list[tuple[int, Spans, Taps]]
    """The groups of its plan that are delivered: index, positions and taps."""
    coming: deque[tuple[int, Stored]] = field(default_factory=deque)
    """What its steps will compute, with the position after each block."""
    computed: list[Stored] = field(default_factory=list)
    """What they have computed."""
    reached: int = 0
    """The position up to which the current step computes it."""


def may_store(request: "Request", plan: CapturePlan) -> bool:
    """Whether the rows of a request's prompt may be stored and reused."""
    params = request.sampling_params
    return bool(
        params is not None
        and params.capture_cache
        and plan.first_prompt_row is not None
        and plan.row_lanes
        and not plan.keeping  # It is decided at the end which of its rows there are.
    )


class RowStore:
    """Decides which rows are stored, for one engine core."""

    def __init__(
        self,
        block_size: int,
        tap_bytes: Callable[[Tap], int],
        memory_bytes: int,
        disk_bytes: int = 0,
    ) -> None:
        """Start empty.

        Args:
            block_size: tokens of a block.
            tap_bytes: the bytes of a row at a tap.
            memory_bytes: most bytes in the memory of the workers of the engine.
            disk_bytes: most bytes on their disks.

        """
        self._size = block_size
        self._tap_bytes = tap_bytes
        self._limits = memory_bytes, disk_bytes
        self._used = [0, 0]
        self._order: tuple[OrderedDict[int, Stored], OrderedDict[int, Stored]] = (
            OrderedDict(),
            OrderedDict(),
        )
        """What is ready, in memory and on disk, by number; unused for longest first."""
        self._blocks: dict[BlockHash, list[Stored]] = {}
        self._requests: dict[str, Captured] = {}
        self._computing: dict[str, Captured] = {}
        """Those of them whose blocks are not all computed."""
        self._numbers = count()
        self._changes: list[StoreChange] = []

    def add_request(self, request: "Request", plan: CapturePlan) -> None:
        """Register a request; only to be called if `may_store`."""
        first, prompt = plan.first_prompt_row, plan.num_prompt_tokens
        assert first is not None, "no row of the prompt is captured"
        read = {} if plan.readouts is None else plan.readouts.staged
        starts = [spans[0][0] for spans in read.values() if spans]
        self._requests[request.request_id] = Captured(
            request,
            first,
            min([start for start in starts if start < prompt], default=OPEN_END),
            prompt // self._size,
            [
                (number, group.ranges, frozenset(group.taps))
                for number, group in enumerate(plan.groups)
                if any(reader.instance != READOUTS for reader in group.readers)
            ],
        )

    def reusable(self, request: "Request", most: int) -> int:
        """How many of the first `most` tokens are reused if they are cached."""
        known = self._requests[request.request_id]
        most = min(most, known.most)
        end = known.first
        for block in range(end // self._size, cdiv(most, self._size)):
            if not self._has(request, block, known):
                break
            end = (block + 1) * self._size
        return min(most, end)

    def _has(self, request: "Request", block: int, known: Captured) -> bool:
        """Whether all captured rows of a block are stored."""
        start, stop = block * self._size, (block + 1) * self._size
        return block < len(request.block_hashes) and all(
            self._find(request.block_hashes[block], taps, ready=True) is not None
            for _, spans, taps in known.groups
            if overlap(spans, start, stop)
        )

    def _find(self, name: "BlockHash", taps: Taps, ready: bool) -> Stored | None:
        for stored in self._blocks.get(name, ()):
            if stored.ready >= ready and taps <= stored.taps:
                return stored
        return None

    def begin(self, request: "Request", computed: int) -> None:
        """Have the rows of cached blocks loaded, and those of further ones stored.

        Args:
            request: begins to run, for the first time or again.
            computed: how many of its tokens are cached.

        """
        known = self._requests[request.request_id]
        if computed > known.first:
            places = list(self._places(request, known, computed))
            load = LoadRows(
                request.request_id, self._size, known.first, computed, places
            )
            self._changes.append(load)
        kept = list(self._begin_storing(request, known, computed // self._size))
        if kept:
            self._changes.append(KeepRows(request.request_id, self._size, kept))
            self._computing[request.request_id] = known

    def _places(
        self, request: "Request", known: Captured, computed: int
    ) -> Iterator[Place]:
        first, stop = known.first // self._size, cdiv(computed, self._size)
        # Of a prompt the end is of no use without its beginning, so that is used last.
        for block in reversed(range(first, stop)):
            start = max(block * self._size, known.first)
            for number, spans, taps in known.groups:
                if overlap(spans, start, min((block + 1) * self._size, computed)):
                    found = self._find(request.block_hashes[block], taps, ready=True)
                    if found is None:
                        continue  # The result says which rows are missing.
                    for order in self._order:
                        if found.number in order:
                            order.move_to_end(found.number)
                    yield block, number, found.number

    def _begin_storing(
        self, request: "Request", known: Captured, first: int
    ) -> Iterator[Place]:
        size = self._size
        for block in range(first, min(known.whole, len(request.block_hashes))):
            name = request.block_hashes[block]
            start, stop = block * size, (block + 1) * size
            for number, spans, taps in known.groups:
                whole = overlap(spans, start, stop) == [(start, stop)]
                if not whole or self._find(name, taps, ready=False) is not None:
                    continue
                num_bytes = size * sum([self._tap_bytes(tap) for tap in taps])
                if not self._make_room(num_bytes, 0):
                    return
                stored = Stored(next(self._numbers), name, taps, num_bytes)
                self._used[0] += num_bytes
                self._blocks.setdefault(name, []).append(stored)
                known.coming.append((stop, stored))
                yield block, number, stored.number

    def _make_room(self, num_bytes: int, tier: int) -> bool:
        """Whether a tier, memory or disk, has room, if need be for others' rows."""
        limit, order = self._limits[tier], self._order[tier]
        if num_bytes > limit:
            return False
        while self._used[tier] + num_bytes > limit:
            if not order:
                return False
            number, stored = order.popitem(last=False)
            if tier == 0 and self._make_room(stored.num_bytes, 1):
                self._used[0] -= stored.num_bytes
                self._used[1] += stored.num_bytes
                self._order[1][number] = stored
                self._changes.append(MoveRows(number, "disk"))
            else:
                self._drop(stored, tier)
        return True

    def _drop(self, stored: Stored, tier: int = 0) -> None:
        self._used[tier] -= stored.num_bytes
        others = self._blocks[stored.block]
        others.remove(stored)
        if not others:
            del self._blocks[stored.block]
        self._changes.append(MoveRows(stored.number, "nowhere"))

    def scheduled(self, request_id: str, stop: int) -> None:
        """Note that the step computes a request up to position `stop`."""
        known = self._computing.get(request_id)
        if known is not None:
            known.reached = stop

    def preempt(self, request_id: str) -> None:
        """Note that a request will begin again, after tokens that are cached then."""
        known = self._computing.pop(request_id, None)
        if known is not None:
            self._give_up(known)

    def new_step(self) -> None:
        """Begin a step: rows of the one before may be reused."""
        for request_id, known in list(self._computing.items()):
            self._settle(known)
            if not known.coming:
                del self._computing[request_id]

    def _settle(self, known: Captured) -> None:
        names = known.request.block_hashes
        if known.request.num_computed_tokens < known.reached:
            # It was computed from keys and values that could not be loaded.
            self._give_up(known)
        while known.coming and known.coming[0][0] <= known.reached:
            stop, stored = known.coming.popleft()
            if names[stop // self._size - 1] != stored.block:
                # Vectors or weights have changed before it was computed.
                self._drop(stored)
                continue
            stored.ready = True
            self._order[0][stored.number] = stored
            known.computed.append(stored)

    def _give_up(self, known: Captured) -> None:
        """Drop what a request was to compute."""
        for _, stored in known.coming:
            self._drop(stored)
        known.coming.clear()

    def free(self, request_id: str) -> None:
        """Forget a request that has finished; what it has not computed is dropped."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return
        self._computing.pop(request_id, None)
        self._settle(known)
        for stored in reversed(known.computed):
            if stored.number in self._order[0]:
                self._order[0].move_to_end(stored.number)
        self._give_up(known)

    def clear(self) -> None:
        """Drop all rows that are stored, as the prefix cache was reset."""
        for tier, order in enumerate(self._order):
            while order:
                _, stored = order.popitem()
                self._drop(stored, tier)

    def take_changes(self) -> list[StoreChange]:
        """Return and clear what the workers have to do with the next step."""
        changes, self._changes = self._changes, []
        return changes
