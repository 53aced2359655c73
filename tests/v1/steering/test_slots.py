# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.steering.slots import Slots, decode_row, prefill_row

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release"]), st.integers(0, 7), st.integers(0, 5)
    )
)


@given(steps=STEPS, size=st.integers(1, 3))
def test_a_slot_holds_one_configuration_as_long_as_it_has_users(
    steps: list[tuple[str, int, int]], size: int
) -> None:
    slots = Slots(size)
    loaded: dict[int, str] = {}  # the workers' content of each slot
    users: dict[str, tuple[int, str]] = {}
    for action, number, config in steps:
        user, digest = f"user {number}", f"config {config}"
        if action == "release":
            slots.release(user)
            users.pop(user, None)
        elif user not in users:
            busy = {held for _, held in users.values()}
            assert slots.has_room(digest) or (len(busy) == size and digest not in busy)
            if not slots.has_room(digest):
                continue
            slot, is_new = slots.acquire(user, digest)
            if is_new:
                loaded[slot] = digest
            users[user] = slot, digest
        for slot, digest in users.values():
            assert loaded[slot] == digest
        held = {digest for _, digest in users.values()}
        assert slots.in_use == len(held) <= size
        assert len({slot for slot, _ in users.values()}) == len(held)


def test_a_configuration_stays_loaded_until_its_slot_is_needed() -> None:
    slots = Slots(2)
    for digest in ("a", "b"):
        assert slots.acquire(digest, digest)[1]
        slots.release(digest)
    assert not slots.acquire("again", "a")[1]
    assert slots.acquire("c", "c") == (1, True), "the idle one is taken"


@given(steps=STEPS, sizes=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_what_is_loaded_fits_into_the_room_for_vectors(
    steps: list[tuple[str, int, int]], sizes: list[int]
) -> None:
    slots = Slots(3, room=7)
    slots.taken = 2
    loaded: dict[int, int] = {}  # bytes of the workers' content of each slot
    users: set[str] = set()
    for action, number, config in steps:
        user, digest, size = f"user {number}", f"config {config}", sizes[config]
        if action == "release":
            slots.release(user)
            users.discard(user)
        elif user not in users and slots.has_room(digest, size):
            for emptied in slots.make_room(digest, size):
                loaded[emptied] = 0
            slot, is_new = slots.acquire(user, digest, size)
            if is_new:
                assert sum(loaded.values()) + size + 2 <= 7, "the old goes afterwards"
                loaded[slot] = size
            users.add(user)
            assert sum(loaded.values()) + 2 <= 7
    for user in users:
        slots.release(user)
    assert all(slots.has_room("other", size) for size in range(6))


def test_rows_of_slots_are_distinct_and_leave_the_first_three() -> None:
    rows = [row(slot) for slot in range(5) for row in (prefill_row, decode_row)]
    assert sorted(rows) == list(range(3, 13))
