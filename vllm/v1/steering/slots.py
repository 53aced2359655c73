# SPDX-License-Identifier: Apache-2.0
"""Slots: the loaded configurations and the requests that use them.

Slot `i` owns two rows of every table: prefill row `3 + 2 i` and decode row `4 + 2 i`.
Both are assigned together, so a request that has begun its prompt can always decode.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from vllm.v1.residual.steering_actions import Action
from vllm.v1.steering.plan import SteeringTiers

ZERO_ROW = 0
"""The row that adds nothing: for padding, and for all tokens while no vector is set."""
GLOBAL_PREFILL_ROW = 1
"""The row for prompt tokens of requests without a configuration of their own."""
GLOBAL_DECODE_ROW = 2
"""The row for generated tokens of requests without a configuration of their own."""


def prefill_row(slot: int) -> int:
    """The row for prompt tokens of the slot's requests."""
    return 3 + 2 * slot


def decode_row(slot: int) -> int:
    """The row for generated tokens of the slot's requests."""
    return 4 + 2 * slot


class Slots:
    """Reference-counted slots for configurations, by digest.

    A configuration stays loaded after its last user has finished, until its slot is
    needed: the next request with the same configuration loads nothing.
    """

    def __init__(self, num_slots: int, room: int | None = None) -> None:
        """Start with empty slots.

        Args:
            num_slots: number of slots.
            room: most bytes of operations' vectors; None for no limit.

        """
        self._room = room
        self.taken = 0
        """Bytes of it that the operations of the engine's own vectors take."""
        self._sizes = [0] * num_slots
        """Bytes of operations' vectors in each slot's configuration."""
        self._held = self._used = 0
        """The sum of these sizes, and that of slots with users."""
        self._users: list[set[str]] = [set() for _ in range(num_slots)]
        self._loaded: list[str | None] = [None] * num_slots
        self._slot_of: dict[str, int] = {}
        self._slot_of_user: dict[str, int] = {}
        # Slots without users, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def in_use(self) -> int:
        """Number of slots with users."""
        return len(self._users) - len(self._idle)

    def has_room(self, digest: str, size: int = 0) -> bool:
        """Whether a request with this configuration can get a slot now.

        Args:
            digest: the configuration's digest.
            size: bytes of its operations' vectors.

        """
        if digest in self._slot_of:
            return True
        return bool(self._idle) and self._fits(self._used + size)

    def _fits(self, size: int) -> bool:
        return self._room is None or size + self.taken <= self._room

    def make_room(self, digest: str, size: int) -> list[int]:
        """Unload idle configurations until another one fits; returns the emptied slots.

        The content of the slot that the new configuration will take counts too: it is
        freed after the new one is loaded. The arguments are those of `has_room`.
        """
        if digest in self._slot_of:
            return []
        needed = self._held + size
        emptied = []
        for slot in self._idle:
            if self._fits(needed):
                break
            if self._sizes[slot]:
                needed -= self._sizes[slot]
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
        self._held -= self._sizes[slot]
        self._sizes[slot] = 0

    def acquire(self, user: str, digest: str, size: int = 0) -> tuple[int, bool]:
        """Assign a configuration's slot to `user`; also whether it must be loaded.

        `has_room` must be true, and `user` must not have a slot.
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
            self._held += size
            self._slot_of[digest] = slot
        if not self._users[slot]:
            self._used += self._sizes[slot]
        self._idle.pop(slot, None)
        self._users[slot].add(user)
        self._slot_of_user[user] = slot
        return slot, is_new

    def release(self, user: str) -> None:
        """Release the slot of `user`, if it has one."""
        slot = self._slot_of_user.pop(user, None)
        if slot is None:
            return
        self._users[slot].discard(user)
        if not self._users[slot]:
            self._idle[slot] = None
            self._used -= self._sizes[slot]


@dataclass(slots=True)
class SteeringStep:
    """The scheduler's decisions for a step, which all ranks apply alike."""

    loads: list[tuple[int, SteeringTiers]] = field(default_factory=list)
    """Slots that load another configuration before the step runs."""
    uses: dict[str, int] = field(default_factory=dict)
    """The slots of steered requests that start, or resume after preemption, by id."""
    actions: list[Action] = field(default_factory=list)
    """What consumers have decided within earlier steps, with pipeline stages."""
