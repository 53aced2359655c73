# SPDX-License-Identifier: Apache-2.0
"""Which configurations are loaded, and who uses them.

Slot `i` stands for two rows of every table: prefill row `3 + 2 i` and decode row
`4 + 2 i`. Both are taken together, so a request that has begun its prompt can
always decode.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from vllm.v1.steering.plan import SteeringTiers

ZERO_ROW = 0
"""Adds nothing: padding, and everything while no vector is set."""
GLOBAL_PREFILL_ROW = 1
"""Prompt tokens of requests without a configuration of their own."""
GLOBAL_DECODE_ROW = 2
"""Generated tokens of requests without a configuration of their own."""


def prefill_row(slot: int) -> int:
    """The row that steers prompt tokens of the slot's requests."""
    return 3 + 2 * slot


def decode_row(slot: int) -> int:
    """The row that steers generated tokens of the slot's requests."""
    return 4 + 2 * slot


class Slots:
    """Reference-counted slots for configurations, by digest.

    A configuration stays loaded after its last user has gone, until its slot is
    needed: the next request with it costs nothing.
    """

    def __init__(self, num_slots: int, room: int | None = None) -> None:
        """Load nothing.

        Args:
            num_slots: how many.
            room: bytes that the vectors of operations may take; None for any number.

        """
        self._room = room
        self._sizes = [0] * num_slots
        """Bytes of each slot's configuration."""
        self._users: list[set[str]] = [set() for _ in range(num_slots)]
        self._loaded: list[str | None] = [None] * num_slots
        self._slot_of: dict[str, int] = {}
        self._slot_of_user: dict[str, int] = {}
        # Slots without users, the one that has been idle longest first.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def in_use(self) -> int:
        """How many slots have users."""
        return len(self._users) - len(self._idle)

    def has_room(self, digest: str, size: int = 0, taken: int = 0) -> bool:
        """Whether a request with this configuration can get a slot now.

        Args:
            digest: of the configuration.
            size: bytes of its operations' vectors.
            taken: bytes of those that act for all requests.

        """
        if digest in self._slot_of:
            return True
        kept = sum(self._sizes) - sum(self._sizes[slot] for slot in self._idle)
        return bool(self._idle) and self._fits(kept + size + taken)

    def _fits(self, size: int) -> bool:
        return self._room is None or size <= self._room

    def make_room(self, digest: str, size: int, taken: int) -> list[int]:
        """Forget idle configurations until another one fits; which slots are emptied.

        The slot that the other one takes is among them if it has bytes to give back:
        what was there goes before what comes. Arguments are those of `has_room`.
        """
        if digest in self._slot_of:
            return []
        emptied = []
        for slot in list(self._idle):
            is_next = slot == next(iter(self._idle))
            full = not self._fits(sum(self._sizes) + size + taken)
            if self._sizes[slot] and (full or is_next):
                self._forget(slot)
                emptied.append(slot)
        for slot in reversed(emptied):
            self._idle.move_to_end(slot, last=False)
        return emptied

    def _forget(self, slot: int) -> None:
        previous = self._loaded[slot]
        if previous is not None:
            del self._slot_of[previous]
        self._loaded[slot] = None
        self._sizes[slot] = 0

    def acquire(self, user: str, digest: str, size: int = 0) -> tuple[int, bool]:
        """Give `user` the slot of a configuration; whether it must be loaded.

        `has_room` must hold, and `user` must not have a slot.
        """
        assert user not in self._slot_of_user, f"{user} has a steering slot already"
        slot = self._slot_of.get(digest)
        is_new = slot is None
        if slot is None:
            assert self._idle, "no steering slot is free"
            slot = next(iter(self._idle))
            self._forget(slot)
            self._loaded[slot] = digest
            self._sizes[slot] = size
            self._slot_of[digest] = slot
        self._idle.pop(slot, None)
        self._users[slot].add(user)
        self._slot_of_user[user] = slot
        return slot, is_new

    def release(self, user: str) -> None:
        """`user` has finished or is preempted; nothing happens if it has no slot."""
        slot = self._slot_of_user.pop(user, None)
        if slot is None:
            return
        self._users[slot].discard(user)
        if not self._users[slot]:
            self._idle[slot] = None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A request that is scheduled for the first time, or again after preemption."""

    slot: int
    """The slot of its configuration, whose rows steer its tokens."""
    num_prompt_tokens: int


@dataclass(slots=True)
class SteeringStep:
    """Decided by the scheduler alone, so that all ranks do the same."""

    loads: list[tuple[int, SteeringTiers]] = field(default_factory=list)
    """Slots that get another configuration, before the step runs."""
    uses: dict[str, SlotUse] = field(default_factory=dict)
    """Steered requests by id."""
