# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.v1.capture.consumers._drive import consumer_at, deliver, rows_of
from vllm.v1.capture.consumers.filesystem import (
    CaptureStore,
    read_request,
)
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS

Captured = dict[str, dict[tuple[int, str], torch.Tensor]]


def captured(root: Path, dtype: torch.dtype = torch.bfloat16, **params) -> Captured:
    requests = {
        f"r{i}": {
            (la, "post_block"): rows_of(7, 32, 10 * i + la, dtype) for la in (0, 2)
        }
        for i in range(3)
    }
    deliver(consumer_at(root, **params), requests)
    return requests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_found_by_request_layer_hook_and_position(
    tmp_path: Path, layout: str
) -> None:
    requests = captured(tmp_path, default_layout=layout)
    store = CaptureStore(tmp_path)
    assert store.requests == [("default", name) for name in requests]
    assert len(store) == 6
    for name, rows in requests.items():
        for (layer, hook), tensor in rows.items():
            stored = store.one(name, layer, hook)
            assert torch.equal(stored.to_torch(), tensor)
            assert torch.equal(stored.to_torch([5, 1]), tensor[[5, 1]])
            assert np.array_equal(stored.to_numpy([6]), tensor[[6]].float().numpy())
            assert list(stored.token_ids) == [100 + i for i in range(7)]
            assert torch.equal(torch.cat(list(stored.blocks(3))), tensor)


def test_a_position_that_was_not_captured_is_an_error(tmp_path: Path) -> None:
    captured(tmp_path)
    with pytest.raises(KeyError, match="position 7"):
        CaptureStore(tmp_path).one("r0", 0, "post_block").to_torch([7])
    with pytest.raises(KeyError, match="was not captured"):
        CaptureStore(tmp_path).one("r0", 1, "post_block")


def test_writing_to_rows_changes_no_file(tmp_path: Path) -> None:
    requests = captured(tmp_path)
    store = CaptureStore(tmp_path)
    store.one("r0", 0, "post_block").to_torch().zero_()
    again = store.one("r0", 0, "post_block").to_torch()
    assert torch.equal(again, requests["r0"][0, "post_block"])


def test_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    requests = captured(tmp_path, torch.float32)
    every = torch.cat([rows[2, "post_block"] for rows in requests.values()]).double()
    got = CaptureStore(tmp_path).statistics(layer=2)
    assert got.num_rows == 21
    assert torch.allclose(got.mean, every.mean(dim=0))
    assert torch.allclose(got.std, every.std(dim=0, correction=0))
    assert got.mean_norm == pytest.approx(every.norm(dim=1).mean().item())
    assert got.largest == pytest.approx(every.abs().max().item())
    with pytest.raises(ValueError, match="no row"):
        CaptureStore(tmp_path).statistics(layer=1)


def test_layers_and_requests_are_compared(tmp_path: Path) -> None:
    requests = captured(tmp_path, torch.float32)
    store = CaptureStore(tmp_path)
    layers, matrix = store.layer_cosines("r0", "post_block")
    rows = requests["r0"]
    similar = torch.nn.functional.cosine_similarity
    want = similar(rows[0, "post_block"], rows[2, "post_block"], dim=1).mean()
    assert layers == [0, 2]
    assert matrix[0, 1].item() == pytest.approx(want.item(), abs=1e-5)
    assert torch.allclose(matrix.diagonal(), torch.ones(2))
    names, between = store.request_cosines(2, "post_block")
    means = [requests[name][2, "post_block"].mean(dim=0) for name in names]
    want = similar(means[0], means[2], dim=0)
    assert names == ["r0", "r1", "r2"]
    assert between[0, 2].item() == pytest.approx(want.item(), abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_noticed(tmp_path: Path, layout: str) -> None:
    rows = {(0, "post_block"): rows_of(4, 8, 0, torch.float32)}
    consumer = consumer_at(tmp_path, default_layout=layout)
    results = deliver(consumer, {"r": rows})
    (path,) = map(Path, results["r"].payload)
    read_request(tmp_path, "default", "r")
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        read_request(tmp_path, "default", "r")
