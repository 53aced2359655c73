# SPDX-License-Identifier: Apache-2.0
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.capture.consumers._drive import consumer_at, context, deliver, rows_of
from vllm.v1.capture.consumers.filesystem import (
    CaptureStore,
    read_packed,
    read_per_file,
    read_request,
    read_sharded,
)
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS
from vllm.v1.capture.consumers.storage import files
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.types import CaptureResult

Rows = dict[tuple[int, str], torch.Tensor]


def some_rows(num_rows: int = 5, dtype: torch.dtype = torch.bfloat16) -> Rows:
    return {
        (layer, hook): rows_of(num_rows, 16, layer, dtype)
        for layer in (0, 3)
        for hook in ("pre_attn", "post_block")
    }


def assert_same(got: Rows, want: Rows) -> None:
    assert got.keys() == want.keys()
    for tap, rows in want.items():
        assert got[tap].dtype == rows.dtype
        assert torch.equal(got[tap], rows)


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    chunk_rows=st.integers(1, 7),
    surplus=st.integers(0, 3),
    buffer_bytes=st.sampled_from([1, 500, 1 << 20]),
    coalesce=st.sampled_from([1, 100, 1 << 20]),
    fsync=st.booleans(),
)
def test_what_is_written_is_read(
    layout, dtype, sizes, chunk_rows, surplus, buffer_bytes, coalesce, fsync
) -> None:
    requests = {f"r{i}": some_rows(n, dtype) for i, n in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as root:
        consumer = consumer_at(
            Path(root),
            default_layout=layout,
            buffer_bytes=buffer_bytes,
            coalesce_max_bytes=coalesce,
            num_shards=2,
            fsync=fsync,
        )
        results = deliver(consumer, requests, chunk_rows, surplus)
        assert {r.status for r in results.values()} == {"ok"}, results
        for request_id, rows in requests.items():
            assert_same(read_request(root, "default", request_id), rows)
            for path in results[request_id].payload:
                assert Path(path).is_file()
        assert not (Path(root) / ".incomplete").exists()


def test_per_file_names_and_sidecar(tmp_path: Path) -> None:
    rows = some_rows()
    deliver(consumer_at(tmp_path), {"r": rows}, surplus=1)
    folder = tmp_path / "default" / "r"
    names = {f"{la}_{hook}.{end}" for la, hook in rows for end in ("bin", "json")}
    assert {path.name for path in folder.iterdir()} == names
    tensor, sidecar = read_per_file(folder / "3_post_block.bin")
    assert torch.equal(tensor, rows[3, "post_block"])
    assert sidecar["request_id"] == "r"
    assert (sidecar["layer"], sidecar["hook"]) == (3, "post_block")
    assert (sidecar["shape"], sidecar["dtype"]) == ([5, 16], "bfloat16")
    assert sidecar["layer_convention"] == "0-based block index"
    assert sidecar["token_ids"] == [100, 101, 102, 103, 104]
    assert (folder / "3_post_block.bin").read_bytes() == bytes(
        tensor.view(torch.uint8).numpy()
    )


def test_packed_has_one_entry_per_key(tmp_path: Path) -> None:
    rows = some_rows()
    results = deliver(consumer_at(tmp_path, default_layout="packed"), {"r": rows})
    folder = tmp_path / "default" / "r"
    assert {path.name for path in folder.iterdir()} == {"packed.bin", "packed.json"}
    assert results["r"].payload == [str(folder / "packed.bin")]
    index = json.loads((folder / "packed.json").read_text())
    assert (index["layout"], index["dtype"]) == ("packed", "bfloat16")
    end = 0
    for entry in index["entries"]:
        assert entry["offset"] == end
        assert entry["shape"] == [5, 16]
        end += entry["nbytes"]
    assert end == (folder / "packed.bin").stat().st_size == 4 * 5 * 16 * 2
    assert_same(read_packed(folder / "packed.bin")[0], rows)


@pytest.mark.parametrize("layout", ["packed", "sharded"])
def test_each_pipeline_stage_has_files_of_its_own(tmp_path: Path, layout: str) -> None:
    rows = some_rows()
    for stage, layer in enumerate((0, 3)):
        part = {tap: tensor for tap, tensor in rows.items() if tap[0] == layer}
        deliver(
            consumer_at(tmp_path, default_layout=layout, num_shards=1),
            {"r": part},
            pipeline_parallel_rank=stage,
            pipeline_parallel_size=2,
        )
    names = {path.name for path in tmp_path.rglob("*.bin")}
    assert names == (
        {"packed-pp00.bin", "packed-pp01.bin"}
        if layout == "packed"
        else {"shard-pp00-000-00000.bin", "shard-pp01-000-00000.bin"}
    )
    assert_same(read_request(tmp_path, "default", "r"), rows)


def test_shards_roll_over_at_their_size_and_number_on(tmp_path: Path) -> None:
    requests = {f"r{i}": some_rows() for i in range(6)}
    size = 4 * 5 * 16 * 2
    for _ in range(2):  # the second run continues after the first one
        consumer = consumer_at(
            tmp_path,
            default_layout="sharded",
            num_shards=1,
            writer_threads=1,
            shard_max_bytes=2 * size,
        )
        deliver(consumer, requests)
    paths = sorted((tmp_path / "default").glob("*.bin"))
    assert [path.name for path in paths] == [f"shard-000-{i:05d}.bin" for i in range(6)]
    assert {path.stat().st_size for path in paths} == {2 * size}
    assert_same(read_sharded(tmp_path, "default", "r5"), requests["r5"])


def test_a_request_chooses_its_layout_tag_and_name(tmp_path: Path) -> None:
    rows = some_rows()
    spec = {"tag": "a b", "request_id": "x/y", "layout": "packed"}
    results = deliver(consumer_at(tmp_path), {"r": rows}, client_spec=spec)
    assert results["r"].payload == [str(tmp_path / "a_b" / "x_y" / "packed.bin")]
    assert_same(read_request(tmp_path, "a_b", "x_y"), rows)


@pytest.mark.parametrize("layout", ["per_file", "packed"])
def test_on_collision(tmp_path: Path, layout: str) -> None:
    first, second = some_rows(5), some_rows(3)
    params = {"default_layout": layout}
    deliver(consumer_at(tmp_path, **params), {"r": first})
    refusing = consumer_at(tmp_path, **params, on_collision="error")
    result = deliver(refusing, {"r": second})["r"]
    assert result.status == "error"
    assert "exists already" in result.error
    assert_same(read_request(tmp_path, "default", "r"), first)
    assert deliver(consumer_at(tmp_path, **params), {"r": second})["r"].status == "ok"
    assert_same(read_request(tmp_path, "default", "r"), second)


def test_a_short_file_is_not_read(tmp_path: Path) -> None:
    deliver(consumer_at(tmp_path), {"r": some_rows()})
    path = tmp_path / "default" / "r" / "0_pre_attn.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="159 bytes"):
        read_per_file(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_an_earlier_build_has_encoded_are_refused(
    tmp_path: Path, layout: str
) -> None:
    results = deliver(consumer_at(tmp_path, default_layout=layout), {"r": some_rows()})
    path = Path(results["r"].payload[0]).with_suffix(".json")
    index = json.loads(path.read_text())
    index.get("entries", [index])[0]["codec"] = {"name": "zstd", "blocks": [[5, 99]]}
    path.write_text(json.dumps(index))
    for read in (CaptureStore, partial(read_request, tag="default", request_id="r")):
        with pytest.raises(ValueError, match=r"zstd.*the version that wrote it"):
            read(tmp_path)


def test_every_parameter_of_the_contract_is_accepted(tmp_path: Path) -> None:
    consumer = consumer_at(
        tmp_path,
        writer_threads=1,
        queue_size=8,
        timeout_seconds=2.5,
        on_collision="error",
        fd_cache_size=16,
        fsync=True,
        atomic_publish=True,
        default_layout="sharded",
        coalesce_max_bytes=1024,
        num_shards=2,
        shard_max_bytes=4096,
        global_hooks={"post_block": [0]},
        global_positions="all",
        default_tag="t",
    )
    spec = consumer.global_capture_spec()
    assert (spec.hooks, spec.positions) == ({"post_block": [0]}, "all")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layout", "packed"),
        ("default_layout", "tar"),
        ("writer_threads", 0),
        ("writer_threads", True),
        ("num_shards", 1001),
        ("timeout_seconds", 0),
        ("timeout_seconds", "soon"),
        ("atomic_publish", 1),
        ("fd_cache_size", "8"),
        ("default_tag", "../up"),
        ("codec", "zstd"),
        ("global_hooks", [0]),
    ],
)
def test_wrong_parameters_name_themselves(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(CaptureValidationError, match=name):
        consumer_at(tmp_path, **{name: value})


@pytest.mark.parametrize(
    "spec",
    [
        {"request_id": "../x"},
        {"request_id": "/x"},
        {"request_id": ".."},
        {"request_id": ""},
        {"tag": "a/../../b"},
        {"tag": ".incomplete"},
        {"tag": ""},
        {"layout": "tar"},
        {"codec": "zstd"},
        {"folder": "x"},
    ],
)
def test_wrong_requests_are_refused(tmp_path: Path, spec: dict[str, str]) -> None:
    raw = {"hooks": {"post_block": [0]}, **spec}
    with pytest.raises(CaptureValidationError, match=next(iter(spec))):
        consumer_at(tmp_path).validate_client_spec(raw, context())


@pytest.mark.parametrize("layouts", [("per_file", "per_file"), ("packed", "per_file")])
def test_what_an_earlier_request_of_the_name_has_left_does_not_count(
    tmp_path: Path, layouts: tuple[str, str]
) -> None:
    first, second = some_rows(5), {(3, "pre_attn"): some_rows(4)[0, "pre_attn"]}
    spec = {"request_id": "same"}
    for name, rows, layout in (("r1", first, layouts[0]), ("r2", second, layouts[1])):
        consumer = consumer_at(tmp_path, default_layout=layout)
        deliver(consumer, {name: rows}, client_spec=spec)
    assert_same(read_request(tmp_path, "default", "same"), second)
    store = CaptureStore(tmp_path)
    assert len(store) == 1
    assert torch.equal(
        store.one("same", 3, "pre_attn").to_torch(), second[3, "pre_attn"]
    )


@pytest.mark.parametrize("layout", ["per_file", "packed"])
def test_two_servers_that_write_one_name_do_not_mix_their_files(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **options: Any) -> None:
        publish(*args, **options)
        sleep(0.005)

    publish = files.publish
    monkeypatch.setattr(files, "publish", slow)
    rows = [
        {(layer, "pre_attn"): rows_of(4, 8, seed, torch.float32) for layer in range(4)}
        for seed in range(3)
    ]

    def serve(number: int) -> CaptureResult:
        consumer = consumer_at(tmp_path, default_layout=layout)
        name, spec = f"r{number}", {"request_id": "same"}
        return deliver(consumer, {name: rows[number]}, client_spec=spec)[name]

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(serve, range(3)))
    assert {result.status for result in results} == {"ok"}
    found = read_request(tmp_path, "default", "same")
    assert found.keys() == rows[0].keys()
    whose = [n for n in range(3) if all(found[t].equal(rows[n][t]) for t in found)]
    assert len(whose) == 1, "all files are those of one request"


def test_an_instance_is_called_by_its_own_name(tmp_path: Path) -> None:
    consumer = consumer_at(tmp_path)
    consumer.instance_name = "mine"
    with pytest.raises(
        CaptureValidationError, match=r"^capture\.mine\.layout"
    ) as error:
        consumer.validate_client_spec(
            {"hooks": {"post_block": [0]}, "layout": "heap"}, context()
        )
    assert error.value.parameter == "capture.mine.layout"
