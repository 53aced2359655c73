# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture.consumers._drive import context, deliver, rows_of, sidecar_of
from vllm.v1.capture.capabilities import consumer_capabilities
from vllm.v1.capture.consumer import BatchingSink
from vllm.v1.capture.consumers.memory import MemoryConsumer, path_safe
from vllm.v1.capture.consumers.memory.api import store_of
from vllm.v1.capture.consumers.memory.patch_source import PatchSourceConsumer
from vllm.v1.capture.consumers.memory.store import RowStore, selected
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.types import CaptureFinalize, VllmInternalRequestId

TAPS = {(0, "pre_attn"): 3, (2, "post_block"): 5}
ROWS = {tap: rows_of(n, 8, n, torch.bfloat16) for tap, n in TAPS.items()}
ID = VllmInternalRequestId("r")
SIZE = sum(rows.nbytes for rows in ROWS.values())


def keeping(**params: Any) -> MemoryConsumer:
    return MemoryConsumer(None, params)


def test_rows_of_several_requests_are_found_by_name_as_often_as_wanted() -> None:
    consumer = keeping()
    given_rows = {"a": ROWS, "b": ROWS}
    results = deliver(BatchingSink(consumer), given_rows, client_spec={"name": "train"})
    assert {r.status for r in results.values()} == {"ok"}
    for _ in range(2):
        one, other = consumer.store.get("train")
        assert (one.request_id, other.request_id) == ("a", "b")
        for tap, rows in ROWS.items():
            assert torch.equal(one.rows[tap], rows)
            assert other.rows.token_ids[tap] == [100 + i for i in range(len(rows))]
    told = {"requests": 2, "rows": 16, "bytes": 2 * SIZE}
    assert consumer.store.describe()["names"] == {"train": told}
    assert consumer.store.drop("train") == told
    assert consumer.store.free_bytes == consumer.store.max_bytes
    assert torch.equal(one.rows[0, "pre_attn"], ROWS[0, "pre_attn"])


def test_several_servers_would_not_share_the_rows() -> None:
    two: Any = SimpleNamespace(
        capture_config=SimpleNamespace(host_memory_bytes=1 << 20),
        parallel_config=SimpleNamespace(_api_process_count=2),
    )
    for consumer in (MemoryConsumer, PatchSourceConsumer):
        with pytest.raises(CaptureValidationError, match="--api-server-count 1") as why:
            consumer(two, {})
        assert (why.value.parameter, why.value.value) == (
            f"capture_consumers.{consumer.kind}",
            2,
        )


def test_rows_are_meant_where_runs_are_kept_too() -> None:
    memory, runs = keeping(), PatchSourceConsumer(None, {})
    kept = {"patch_source": runs, "memory": memory}
    capture: Any = SimpleNamespace(consumers=lambda: kept)
    assert store_of(capture) is memory.store
    assert store_of(capture, "patch_source") is runs.store
    kept["other"] = keeping()
    with pytest.raises(CaptureValidationError, match="instance must be one of"):
        store_of(capture)
    capture.consumers = lambda: {"patch_source": runs}
    assert store_of(capture) is runs.store


def test_without_a_name_a_request_is_kept_under_its_id() -> None:
    consumer = keeping()
    deliver(BatchingSink(consumer), {"a/b c": ROWS})
    assert len(consumer.store.get(path_safe("a/b c"))) == 1
    # A client would remove these from the path of a URL.
    assert [path_safe(name) for name in (".", "..", "...", "")] == [
        "_.",
        "_..",
        "...",
        "_",
    ]


GROUP = tuple((layer, "post_block") for layer in range(4))


def ended(sink: BatchingSink, taps: Any, rows: torch.Tensor) -> bool:
    """End a group; whether all of it was kept at once, not key by key."""
    shared = sidecar_of("r", taps[0], rows)
    results = sink.submit_ends("r", [GroupEnd(ID, taps, shared)])
    if results is not None:
        assert [(one.status, one.payload) for one in results] == [("ok", {"name": "r"})]
        return True
    for tap in taps:
        sink.submit_finalize(CaptureFinalize((ID, *tap), sidecar_of("r", tap, rows)))
    return False


def check_kept(consumer: MemoryConsumer, rows: torch.Tensor) -> None:
    (kept,) = consumer.store.get("r")
    assert set(kept.rows) == set(GROUP)
    for tap, one in zip(GROUP, rows, strict=True):
        assert torch.equal(kept.rows[tap], one)
        assert kept.rows.positions[tap] == list(range(len(one)))


@pytest.mark.parametrize("cuts", [[(4,), (4,)], [(2, 2), (2, 2)], [(1, 3), (4,)]])
def test_a_group_is_kept_whole_however_its_rows_arrive(
    cuts: list[tuple[int, ...]],
) -> None:
    """Rows of a step come in parts if they are many; `cuts` are their taps by step."""
    consumer, rows = keeping(), torch.randn(4, 6, 8)
    sink = BatchingSink(consumer)
    for step, parts in enumerate(cuts):
        first, start = 3 * step, 0
        for count in parts:
            stop = start + count
            part = rows[start:stop, first : first + 3]
            positions = list(range(first, first + 3))
            chunk = GroupChunk(ID, GROUP[start:stop], part, first, step, positions)
            sink.submit_rows([chunk])
            start = stop
    assert ended(sink, GROUP, rows[0]) == (len({*cuts}) == 1)
    check_kept(consumer, rows)


@pytest.mark.parametrize("split", [False, True])
def test_stages_that_end_one_after_another_keep_their_own_rows(split: bool) -> None:
    consumer, rows = keeping(), torch.randn(4, 6, 8)
    sink = BatchingSink(consumer)
    stages = (slice(0, 2), slice(2, 4))
    for stage in stages:
        chunk = GroupChunk(ID, GROUP[stage], rows[stage, :2], 0, 0, [0, 1])
        rest = GroupChunk(ID, GROUP[stage], rows[stage, 2:], 2, 1, [2, 3, 4, 5])
        sink.submit_rows([chunk, *(rest.apart() if split else [rest])])
    for stage in stages:
        assert ended(sink, GROUP[stage], rows[0]) != split
    check_kept(consumer, rows)


def test_a_group_whose_keys_have_ends_of_their_own_keeps_their_rows() -> None:
    """As they have if later rows of it were dropped."""
    consumer, rows = keeping(), torch.randn(4, 3, 8)
    sink = BatchingSink(consumer)
    sink.submit_rows([GroupChunk(ID, GROUP, rows, 0, 0, [0, 1, 2])])
    sidecars = [sidecar_of("r", tap, rows[0]) for tap in GROUP]
    ends = [GroupEnd(ID, (tap,), one) for tap, one in zip(GROUP, sidecars, strict=True)]
    assert sink.submit_ends("r", ends) is None
    for tap, one in zip(GROUP, sidecars, strict=True):
        sink.submit_finalize(CaptureFinalize((ID, *tap), one))
    check_kept(consumer, rows)


def test_rows_that_do_not_fit_are_refused_or_reported() -> None:
    consumer = keeping(max_bytes=SIZE)
    raw = {"hooks": {"post_block": [0]}, "positions": "all"}
    assert consumer_capabilities(consumer).takes_requests
    with pytest.raises(CaptureValidationError, match="Drop names"):
        consumer.validate_client_spec(raw, context(num_prompt_tokens=1000))
    for name in ("a/b", ".", "..", "a\n", ""):
        with pytest.raises(CaptureValidationError, match="1 to 128 letters.*'\\.\\.'"):
            consumer.validate_client_spec(raw | {"name": name}, context())
    for name in ("...", ".a", "a..b"):
        keeping().validate_client_spec(raw | {"name": name}, context())
    # Both were admitted while there was room for either.
    results = deliver(BatchingSink(consumer), {"a": ROWS, "b": ROWS})
    assert results["a"].status == "ok"
    assert results["b"].status == "error"
    assert "raise max_bytes" in str(results["b"].error)
    assert consumer.store.describe()["held_bytes"] == SIZE


@pytest.mark.parametrize("wrong", [{"max_byte": 3}, {"max_bytes": 0}])
def test_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(CaptureValidationError, match="capture_consumers.memory"):
        keeping(**wrong)


@given(
    st.lists(st.integers(0, 30), unique=True, max_size=9).map(sorted),
    st.integers(-1, 32),
    st.integers(-1, 32),
)
def test_a_part_has_the_rows_between_two_positions(
    positions: list[int], start: int, stop: int
) -> None:
    rows = RowsByTap()
    facts = {"positions": positions, "token_ids": positions}
    tensor = torch.tensor(positions, dtype=torch.float32).reshape(-1, 1)
    rows.put((3, "post_block"), tensor, facts)
    part = selected(rows, [3], "post_block", start, stop)
    expected = [p for p in positions if start <= p < stop]
    assert part[3, "post_block"].flatten().tolist() == expected
    assert part.positions[3, "post_block"] == expected
    assert not selected(rows, [2]) and not selected(rows, None, "pre_attn")


def put(store: RowStore, name: str, request_id: str = "r", layer: int = 0) -> None:
    rows = ROWS[0, "pre_attn"]
    sidecar = sidecar_of(request_id, (layer, "pre_attn"), rows)
    store.put(name, [(layer, "pre_attn")], rows[None], sidecar)


def test_runs_that_were_not_used_for_longest_make_room() -> None:
    size = ROWS[0, "pre_attn"].nbytes
    store = RowStore(2 * size, evicts=True)
    put(store, "a")
    put(store, "b")
    store.get("a")
    assert store.room == 2 * size and store.free_bytes == 0
    put(store, "c")
    assert "b" not in store and "a" in store
    with store.lease("a"), store.lease("a"):
        with store.lease("c"):
            assert store.room == 0
            with pytest.raises(RuntimeError, match="do not fit"):
                put(store, "d")
        put(store, "d")
        assert "a" in store and "c" not in store
        with pytest.raises(RuntimeError, match="using the run 'a'"):
            put(store, "a", request_id="other")
        assert [one.request_id for one in store.get("a")] == ["r"]
        store.drop("a")  # Whoever asks for it may drop it.
    put(store, "d", layer=1)
    assert len(store.get("d")[0].rows) == 2
    put(store, "e")
    assert store.describe()["names"].keys() == {"e"}


def test_a_run_is_one_request_and_has_rows_of_the_prompt() -> None:
    consumer = PatchSourceConsumer(None, {"max_bytes": 1 << 20})
    raw = {"run": "clean", "hooks": {"pre_attn": "all"}}
    assert consumer.validate_client_spec(raw, context()).positions == "all_prompt"
    for positions in ([0, -1], "last_prompt", {"last": 3}):
        consumer.validate_client_spec(raw | {"positions": positions}, context())
    for wrong in ("all", "all_generated", [11], [10]):
        with pytest.raises(CaptureValidationError, match="rows of the prompt"):
            consumer.validate_client_spec(raw | {"positions": wrong}, context())
    with pytest.raises(CaptureValidationError, match="patch_source has no key 'name'"):
        consumer.validate_client_spec(raw | {"name": "clean"}, context())
    with pytest.raises(CaptureValidationError, match="patch_source.run must be"):
        consumer.validate_client_spec(raw | {"run": "a/b"}, context())
    with consumer.store.lease("clean"):
        consumer.validate_client_spec(raw, context())  # Nothing is there yet.
    for request_id in "ab":
        deliver(BatchingSink(consumer), {request_id: ROWS}, client_spec={"run": "x"})
    (kept,) = consumer.store.get("x")
    assert kept.request_id == "b" and consumer.store.describe()["held_bytes"] == SIZE
    with (
        consumer.store.lease("x"),
        pytest.raises(CaptureValidationError, match="using the run 'x'"),
    ):
        consumer.validate_client_spec(raw | {"run": "x"}, context())
