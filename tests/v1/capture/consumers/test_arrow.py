# SPDX-License-Identifier: Apache-2.0
import errno
import json
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from safetensors import safe_open

from tests.v1.capture.consumers._drive import deliver, rows_of
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as connector,
)
from vllm.v1.capture.consumers.arrow import ArrowConsumer
from vllm.v1.capture.consumers.arrow import rows_of as rows_of_table
from vllm.v1.capture.consumers.storage import files
from vllm.v1.capture.errors import CaptureValidationError

TAPS = ((0, "pre_attn"), (0, "post_block"), (2, "post_block"))


def some(num_rows: int, dtype: torch.dtype) -> dict[tuple[int, str], torch.Tensor]:
    return {tap: rows_of(num_rows, 16, i, dtype) for i, tap in enumerate(TAPS)}


def consumer_at(root: Path, **params: Any) -> ArrowConsumer:
    return ArrowConsumer(None, {"root": str(root), **params})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("kind", ["parquet", "ipc"])
@pytest.mark.parametrize("bfloat16", ["bits", "float32"])
def test_a_dataset_has_every_row_once(
    tmp_path: Path, kind: str, compression: str, dtype: torch.dtype, bfloat16: str
) -> None:
    requests = {f"r{i}": some(i * 3, dtype) for i in range(4)}
    consumer = consumer_at(
        tmp_path,
        format=kind,
        compression=compression,
        buffer_bytes=300,
        bfloat16=bfloat16,
    )
    results = deliver(consumer, requests)
    assert {result.status for result in results.values()} == {"ok"}
    table = ds.dataset(tmp_path, format=kind).to_table()
    assert table.num_rows == (0 + 3 + 6 + 9) * len(TAPS)
    found = rows_of_table(table)
    assert found.dtype is dtype
    for row, values in zip(table.to_pylist(), found, strict=True):
        rows = requests[row["request_id"]][row["layer"], row["hook"]]
        want = rows[row["position"]]
        assert torch.equal(values, want)
        if isinstance(row["values"], bytes):
            assert row["values"] == bytes(want.view(torch.uint8).numpy())
        else:
            assert row["values"] == want.tolist()
        assert row["token_id"] == 100 + row["position"]
    keys = {
        (r["request_id"], r["layer"], r["hook"], r["position"])
        for r in table.to_pylist()
    }
    assert len(keys) == table.num_rows


def values_by_pandas(frame: Any) -> dict[tuple[str, int, str, int], list[float]]:
    return {
        (row.request_id, row.layer, row.hook, row.position): list(row.values_)
        for row in frame.rename(columns={"values": "values_"}).itertuples()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["parquet", "ipc"])
def test_data_tools_open_the_files_as_they_are(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    requests = {f"r{i}": some(3, dtype) for i in range(2)}
    results = deliver(
        consumer_at(tmp_path / "captures", format=kind, bfloat16="float32"), requests
    )
    paths = sorted({path for r in results.values() for path in r.payload})
    frames = [datasets_frame(paths, kind, tmp_path / "cache")]
    if kind == "parquet":
        frames.append(pd.read_parquet(paths))
        frames.append(duckdb.read_parquet(paths).df())
    else:
        frames.append(pd.concat(map(pd.read_feather, paths)))
        if dtype is not torch.float16:  # which DuckDB has in Parquet only
            with duckdb.connect() as connection:
                connection.register("captured", ds.dataset(paths, format="ipc"))
                frames.append(connection.sql("select * from captured").df())
    want = {
        (name, *tap, position): row
        for name, rows in requests.items()
        for tap, tensor in rows.items()
        for position, row in enumerate(tensor.float().tolist())
    }
    for frame in frames:
        assert values_by_pandas(frame) == want


def datasets_frame(paths: list[str], kind: str, cache: Path) -> Any:
    name = "parquet" if kind == "parquet" else "arrow"
    loaded = datasets.load_dataset(
        name, data_files=paths, split="train", cache_dir=str(cache)
    )
    return loaded.to_pandas()


def test_the_schema_says_what_was_widened(tmp_path: Path) -> None:
    consumer = consumer_at(tmp_path, bfloat16="float32")
    deliver(consumer, {"r": some(2, torch.bfloat16)})
    schema = ds.dataset(tmp_path).schema
    assert schema.names == [
        "request_id", "layer", "hook", "position", "token_id", "values",
    ]  # fmt: skip
    assert schema.field("values").type == pa.list_(
        pa.field("element", pa.float32()), 16
    )
    assert schema.metadata[b"captured_dtype"] == b"bfloat16"
    assert schema.metadata[b"stored_dtype"] == b"float"
    assert schema.metadata[b"widened"] == b"true"
    assert schema.metadata[b"layer_convention"] == b"0-based block index"


def test_results_name_files_that_hold_the_request(tmp_path: Path) -> None:
    requests = {f"r{i}": some(8, torch.float32) for i in range(5)}
    results = deliver(consumer_at(tmp_path, shard_max_bytes=4000), requests)
    assert len({path for r in results.values() for path in r.payload}) > 1
    for name, result in results.items():
        column = ds.dataset(result.payload).to_table(["request_id"])["request_id"]
        assert name in column.to_pylist()


def test_safetensors_has_hidden_states_and_token_ids_as_upstream_reads_them(
    tmp_path: Path,
) -> None:
    rows = some(5, torch.bfloat16)
    results = deliver(consumer_at(tmp_path, format="safetensors"), {"r": rows})
    (path,) = results["r"].payload
    assert path == str(tmp_path / "default" / "r.safetensors")
    with safe_open(path, "pt") as file:
        taps = [tuple(tap) for tap in json.loads(file.metadata()["taps"])]
        states = file.get_tensor("hidden_states")
        assert file.get_tensor("token_ids").tolist() == [100, 101, 102, 103, 104]
        assert file.get_tensor("positions").tolist() == [0, 1, 2, 3, 4]
    assert states.shape == (5, 3, 16)
    assert taps == sorted(TAPS)
    for index, tap in enumerate(taps):
        assert torch.equal(states[:, index], rows[tap])

    loaded = connector.load_hidden_states(path)
    assert torch.equal(loaded["hidden_states"], states)
    assert loaded["token_ids"].tolist() == [100, 101, 102, 103, 104]
    connector.cleanup_hidden_states(path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["parquet", "ipc", "safetensors"])
def test_a_failing_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "link", full)
    monkeypatch.setattr(files.os, "rename", full)
    monkeypatch.setattr(files.os, "replace", full)
    results = deliver(consumer_at(tmp_path, format=kind), {"r": some(3, torch.float32)})
    monkeypatch.undo()
    assert results["r"].status == "error"
    assert "No space left" in results["r"].error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "csv"),
        ("compression", "gzip"),
        ("shard_max_bytes", -1),
        ("x", 1),
    ],
)
def test_wrong_parameters_name_themselves(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(CaptureValidationError, match=name):
        consumer_at(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("kind", "places"), [("parquet", []), ("ipc", []), ("safetensors", ["t/a_b"])]
)
def test_only_files_of_a_requests_own_are_claimed(
    tmp_path: Path, kind: str, places: list[str]
) -> None:
    consumer = consumer_at(tmp_path, format=kind)
    spec = {"request_id": "a?b", "tag": "t"}
    assert consumer.claimed_places(spec, "cmpl-1", 1) == places
