# SPDX-License-Identifier: Apache-2.0
"""Names from clients, and foreign files in a root, do not affect captures."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.v1.capture.consumers._drive import deliver, rows_of
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.consumers.filesystem.reader import (
    read_request,
    read_sharded,
    shard_indices,
)
from vllm.v1.capture.consumers.filesystem.store import CaptureStore

TAP = (1, "post_block")


def write(root: Path, layout: str, request_id: str, seed: int) -> torch.Tensor:
    rows = rows_of(3, 8, seed, torch.float32)
    params = {"root": str(root), "default_layout": layout, "num_shards": 1}
    consumer = FilesystemConsumer(None, params)
    internal = f"{request_id}-{seed}"
    results = deliver(
        consumer,
        {request_id: {TAP: rows}},
        vllm_internal_request_id=internal,
    )
    (result,) = results.values()
    assert result.status == "ok", result
    return rows


@pytest.mark.parametrize(
    "name",
    [
        *("shard-000-x.bin", "shard-000-x.json", "shard-000-00000.bin"),
        *("shard-000-00000.json", "shard-pp00-000-00000.json", "packed.json"),
        "shard-000-" + "9" * 150 + ".bin",
    ],
)
@pytest.mark.parametrize("first", ["per_file", "packed"])
def test_a_folder_named_like_a_shard_disables_nothing(
    tmp_path: Path, name: str, first: str
) -> None:
    own = write(tmp_path, first, name, 1)
    shared = write(tmp_path, "sharded", "victim", 2)
    more = write(tmp_path, "sharded", "another", 3)
    (tag,) = (path.name for path in tmp_path.iterdir() if path.name[0] != ".")
    expected = {name: own, "victim": shared, "another": more}
    for request_id, rows in expected.items():
        assert torch.equal(read_request(tmp_path, tag, request_id)[TAP], rows)
    assert torch.equal(read_sharded(tmp_path, tag, "victim")[TAP], shared)
    store = CaptureStore(tmp_path)
    assert len(store) == 3


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    rows = write(tmp_path, "per_file", "a", 1)
    shared = write(tmp_path, "sharded", "b", 2)
    (tag,) = (path for path in tmp_path.iterdir() if path.name[0] != ".")
    for path in (tag / "a" / "notes.json", tag / "shard-list.json", tag / "x.json"):
        path.write_text(json.dumps(["mine"]))
    (tag / "a" / "1_post_block.txt").write_text("mine")
    assert torch.equal(read_request(tmp_path, tag.name, "a")[TAP], rows)
    assert torch.equal(read_request(tmp_path, tag.name, "b")[TAP], shared)
    assert len(CaptureStore(tmp_path)) == 2


@pytest.mark.parametrize("later", ["per_file", "packed", "sharded"])
@pytest.mark.parametrize("earlier", ["per_file", "packed", "sharded"])
def test_the_rows_that_were_written_last_count(
    tmp_path: Path, earlier: str, later: str
) -> None:
    write(tmp_path, earlier, "same", 1)
    for path in tmp_path.rglob("*.json"):
        long_ago = path.stat().st_mtime_ns - 10**10
        os.utime(path, ns=(long_ago, long_ago))
    rows = write(tmp_path, later, "same", 2)
    (tag,) = (path.name for path in tmp_path.iterdir() if path.name[0] != ".")
    assert torch.equal(read_request(tmp_path, tag, "same")[TAP], rows)
    (stored,) = CaptureStore(tmp_path).select(request_id="same")
    assert torch.equal(stored.to_torch(), rows)


def test_a_tag_without_shards_has_none(tmp_path: Path) -> None:
    assert list(shard_indices(tmp_path / "none")) == []
