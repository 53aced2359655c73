# SPDX-License-Identifier: Apache-2.0
"""Names that plug-ins and scripts of an earlier public fork use."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vllm.v1.capture as capture
from tests.v1.capture.consumers._drive import context, deliver, rows_of
from vllm.config.steering_types import SteeringHookPacked, unpack_steering_vectors
from vllm.v1.capture.consumers.filesystem import (
    CaptureStore,
    FilesystemConsumer,
    read_packed,
    read_per_file,
    read_request,
    read_sharded,
)

TAP = (1, "post_block")


def test_everything_that_is_exported_is_there() -> None:
    for name in capture.__all__:
        assert getattr(capture, name) is not None
    assert not hasattr(capture, "SomethingElse")


def test_the_package_loads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("vllm.v1.capture.")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    importlib.reload(capture)
    assert not [name for name in sys.modules if name.startswith("vllm.v1.capture.")]


def test_a_context_tells_of_every_parallelism() -> None:
    found = context()
    assert found.expert_parallel_size == found.data_parallel_size == 1


def written(root: Path, layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rows = {name: rows_of(3, 8, n, dtype) for n, name in enumerate("ab")}
    params = {"root": str(root), "default_layout": layout, "num_shards": 1}
    consumer = FilesystemConsumer(None, params | {"default_tag": "t"})  # type: ignore[arg-type]
    deliver(consumer, {name: {TAP: one} for name, one in rows.items()})
    return rows


def check(entry: Any, rows: torch.Tensor) -> None:
    assert (entry.layer, entry.hook) == TAP
    assert entry.dtype == str(rows.dtype).removeprefix("torch.")
    bits = rows.view(torch.int16).numpy().view(np.uint16)
    expected = bits if rows.dtype is torch.bfloat16 else rows.numpy()
    assert np.array_equal(entry.array, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readers_take_one_path(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = written(tmp_path / "1", "per_file", dtype)
    folder = tmp_path / "1" / "t"
    check(read_per_file(folder / "a" / "1_post_block.bin"), rows["a"])
    tensor, sidecar = read_per_file(folder / "a" / "1_post_block.bin")
    assert torch.equal(tensor, rows["a"]) and sidecar["layer"] == 1
    check(read_request(folder / "a")[TAP], rows["a"])
    rows = written(tmp_path / "2", "packed", dtype)
    check(read_packed(tmp_path / "2" / "t" / "b")[TAP], rows["b"])
    check(read_request(tmp_path / "2" / "t" / "b")[TAP], rows["b"])
    rows = written(tmp_path / "3", "sharded", dtype)
    found = read_sharded(tmp_path / "3" / "t")
    assert sorted(found) == ["a", "b"]
    for name in "ab":
        check(found[name][TAP], rows[name])
        check(read_request(tmp_path / "3" / "t" / name)[TAP], rows[name])


def foreign(path: Path, chunks: list[tuple[str, torch.Tensor]], **more: Any) -> None:
    """A file in the other fork's form: an entry per chunk, no list of requests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries, data = [], b""
    for name, rows in chunks:
        raw = rows.numpy().tobytes()
        entry = {"layer": 1, "hook": "post_block", "shape": list(rows.shape)}
        entry |= {"offset": len(data), "nbytes": len(raw), "request_id": name}
        entries.append(entry)
        data += raw
    path.with_suffix(".bin").write_bytes(data)
    index = {"dtype": "float32", "entries": entries[::-1], **more}
    path.with_suffix(".json").write_text(json.dumps(index))


def test_pieces_of_a_key_are_joined_in_their_order(tmp_path: Path) -> None:
    parts = [rows_of(n, 8, n, torch.float32) for n in (3, 1, 2)]
    whole = torch.cat(parts)
    foreign(tmp_path / "t" / "r" / "packed", [("r", one) for one in parts])
    check(read_packed(tmp_path / "t" / "r")[TAP], whole)
    assert torch.equal(read_request(tmp_path, "t", "r")[TAP], whole)
    with pytest.raises(ValueError, match="several pieces"):
        CaptureStore(tmp_path)
    shards = tmp_path / "s"
    foreign(shards / "shard-000-00000", [("r", parts[0]), ("q", parts[1])])
    foreign(shards / "shard-000-00001", [("r", parts[1]), ("r", parts[2])])
    found = read_sharded(shards)
    check(found["r"][TAP], whole)
    check(found["q"][TAP], parts[1])
    assert torch.equal(read_sharded(tmp_path, "s", "r")[TAP], whole)


def test_packed_vectors_are_unpacked() -> None:
    from tests.hostile.mutations import PACKED, VECTOR

    packed: SteeringHookPacked = PACKED  # type: ignore[assignment]
    found = unpack_steering_vectors({"pre_attn": packed, "post_block": {"2": VECTOR}})
    assert np.array_equal(found["post_block"][2], VECTOR)
    assert np.allclose(found["pre_attn"][1], 0.25)  # Its scale is applied.
