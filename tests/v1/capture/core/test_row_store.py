# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.v1.capture.core.row_store import RowStore, may_store
from vllm.v1.residual.capture_plan import READOUTS, CapturePlan, group_taps
from vllm.v1.residual.capture_step import KeepRows, LoadRows, MoveRows

SIZE = 4
TAPS = {(layer, "post_block"): layer + 1 for layer in range(3)}
"""The bytes of a row by tap."""


def request(name: str, tokens: str, **more: Any) -> Any:
    """A request whose hashes are the texts up to the end of each block."""
    whole = range(SIZE, len(tokens) + 1, SIZE)
    return SimpleNamespace(
        request_id=name,
        block_hashes=[tokens[:stop] for stop in whole],
        sampling_params=SamplingParams(**more),
        num_computed_tokens=len(tokens),
    )


def plan(tokens: str, first: int, layers: Any, **readers: Any) -> CapturePlan:
    wanted = {"file": {(n, "post_block"): ((first, len(tokens)),) for n in layers}}
    return CapturePlan("r", len(tokens), group_taps(wanted | readers, len(tokens)), "")


class Workers:
    """What the workers have, after the changes that they were sent."""

    def __init__(self, memory: int, disk: int) -> None:
        self.limits = memory, disk
        self.bytes: dict[int, int] = {}
        self.on_disk: set[int] = set()
        self.loaded: Counter[str] = Counter()

    def change(self, changes: Any, plans: dict[str, CapturePlan]) -> None:
        for change in changes:
            match change:
                case KeepRows():
                    for _, group, number in change.places:
                        taps = plans[change.request_id].groups[group].taps
                        assert number not in self.bytes
                        self.bytes[number] = SIZE * sum(TAPS[tap] for tap in taps)
                case LoadRows():
                    assert change.start < change.stop
                    self.loaded[change.request_id] += change.stop - change.start
                    assert all(number in self.bytes for *_, number in change.places)
                case MoveRows() if change.to == "disk":
                    self.on_disk.add(change.number)
                case MoveRows():
                    del self.bytes[change.number]
                    self.on_disk.discard(change.number)
        used = sum(self.bytes.values())
        on_disk = sum(self.bytes[number] for number in self.on_disk)
        assert used - on_disk <= self.limits[0] and on_disk <= self.limits[1]


@given(st.data(), st.integers(0, 300), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_the_limits_hold_and_what_is_loaded_was_stored(
    data: st.DataObject, memory: int, disk: int
) -> None:
    store, workers = (
        RowStore(SIZE, TAPS.__getitem__, memory, disk),
        Workers(memory, disk),
    )
    plans: dict[str, CapturePlan] = {}
    for number in range(data.draw(st.integers(1, 12))):
        store.new_step()
        name, tokens = f"r{number}", data.draw(st.text("ab", min_size=1, max_size=24))
        first = data.draw(st.integers(0, len(tokens) - 1))
        layers = data.draw(st.sets(st.integers(0, 2), min_size=1))
        one, own = request(name, tokens), plan(tokens, first, layers)
        plans[name] = own
        store.add_request(one, own)
        most = len(tokens) - 1
        computed = store.reusable(one, most)
        assert min(first, most) <= computed <= most
        computed -= computed % SIZE  # As the prefix cache does.
        store.begin(one, computed)
        if data.draw(st.booleans()):
            store.scheduled(name, data.draw(st.integers(computed, len(tokens))))
            if data.draw(st.booleans()):
                store.preempt(name)
        if data.draw(st.booleans()):
            store.free(name)
        workers.change(store.take_changes(), plans)
        assert workers.loaded[name] == max(computed - first, 0)
    for name in plans:
        store.free(name)
    workers.change(store.take_changes(), plans)


def begun() -> tuple[RowStore, str, Any, Any]:
    """A store with two requests of the same tokens, the first of which has begun."""
    store, tokens = RowStore(SIZE, TAPS.__getitem__, 1000), "abcdefghij"
    one, two = (request(name, tokens) for name in "xy")
    for each in (one, two):
        store.add_request(each, plan(tokens, 0, {0}))
    store.begin(one, 0)
    return store, tokens, one, two


def test_rows_are_reused_in_the_step_after_the_one_that_computes_them() -> None:
    store, _, _, two = begun()
    store.scheduled("x", 6)
    assert store.reusable(two, 9) == 0, "both are of the same step"
    store.new_step()
    assert store.reusable(two, 9) == 4, "the second block is not whole yet"
    store.scheduled("x", 10)
    store.free("x")
    assert store.reusable(two, 9) == 8


@pytest.mark.parametrize("ends", [False, True])
def test_rows_of_a_step_that_lacked_keys_and_values_are_not_stored(ends: bool) -> None:
    """What could not be loaded is computed in another step, or the request ends."""
    store, _, one, two = begun()
    store.scheduled("x", 10)
    one.num_computed_tokens = 0
    if ends:
        store.free("x")
    store.new_step()
    store.scheduled("x", 10)
    one.num_computed_tokens = 10
    store.new_step()
    assert store.reusable(two, 9) == 0


def test_rows_that_a_change_precedes_are_not_stored() -> None:
    """A change of vectors or weights renames the blocks that are not computed yet."""
    store, tokens, one, two = begun()
    store.scheduled("x", 4)
    store.new_step()
    one.block_hashes[1] = "changed"
    store.scheduled("x", 10)
    store.new_step()
    assert store.reusable(two, 9) == 4
    two.block_hashes[1] = "changed"
    assert store.reusable(two, 9) == 4
    workers = Workers(1000, 0)
    workers.change(store.take_changes(), {"x": plan(tokens, 0, {0})})
    assert workers.bytes == {0: SIZE}


def test_a_preempted_request_does_not_store_what_it_finds_cached() -> None:
    store, tokens = RowStore(SIZE, TAPS.__getitem__, 1000), "abcdefghij"
    few, more, last = (request(name, tokens) for name in "xyz")
    for each, layers in ((few, {0}), (more, {0, 1}), (last, {0})):
        store.add_request(each, plan(tokens, 0, layers))
    store.begin(few, 0)
    store.scheduled("x", 10)
    store.preempt("x")
    store.begin(more, 0)
    store.scheduled("y", 10)
    store.new_step()
    store.take_changes()
    for each in (few, last):  # The first one computes neither of the blocks.
        store.begin(each, store.reusable(each, 9))
        store.scheduled(each.request_id, 10)
        store.new_step()
        (load,) = store.take_changes()
        assert isinstance(load, LoadRows)
        assert [number for *_, number in load.places] == [3, 2]


def test_what_readouts_read_is_not_reused() -> None:
    tokens = "abcdefghij"
    own = plan(tokens, 0, {0}, **{READOUTS: {(1, "post_block"): ((0, 10),)}})
    assert may_store(request("r", tokens), own)
    assert not may_store(request("r", tokens, capture_cache=False), own)
    store = RowStore(SIZE, TAPS.__getitem__, 1000)
    store.add_request(request("r", tokens), own)
    store.begin(request("r", tokens), 0)
    (kept,) = store.take_changes()
    assert isinstance(kept, KeepRows)
    assert [own.groups[group].taps for _, group, _ in kept.places] == [
        ((0, "post_block"),)
    ] * 2


def test_rows_under_changed_vectors_are_not_stored_under_the_hash_before() -> None:
    store, one = RowStore(SIZE, TAPS.__getitem__, 1000), request("r", "abcdefghijkl")
    store.add_request(one, plan("abcdefghijkl", 0, {0}))
    store.begin(one, 0)
    store.scheduled("r", 4)
    store.new_step()
    one.block_hashes[1:] = ["changed", "too"]
    store.scheduled("r", 12)
    store.free("r")
    dropped = [one for one in store.take_changes() if isinstance(one, MoveRows)]
    assert len(dropped) == 2
    other = request("x", "abcdefghijkl")
    store.add_request(other, plan("abcdefghijkl", 0, {0}))
    assert store.reusable(other, 11) == 4
