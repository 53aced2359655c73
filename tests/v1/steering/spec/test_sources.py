# SPDX-License-Identifier: Apache-2.0
"""Entries that take their rows from a kept run, a module, or nowhere."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.steering.frontend.test_admission import ONE, POINTS, WIDTH, admit
from vllm.v1.capture.consumers.memory.api import kept_run, leased
from vllm.v1.capture.consumers.memory.patch_source import PatchSourceConsumer
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.tap import PointShape
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend.admission import SteeringAdmission
from vllm.v1.steering.frontend.modules import Module, SteeringModules
from vllm.v1.steering.spec.entry import Heads
from vllm.v1.steering.spec.parse import SteeredModel
from vllm.v1.steering.spec.sources import Sources

KEPT = [0, 1, 2, 4]
ROWS = torch.arange(len(KEPT) * WIDTH).reshape(-1, WIDTH).to(torch.bfloat16) / 3 - 4
TAP = (1, "post_attn")


def admission() -> SteeringAdmission:
    """With the run `clean`, which has five tokens, and the module `tone`."""
    consumer = PatchSourceConsumer(None, {})
    capture: Any = SimpleNamespace(consumers=lambda: {"patch_source": consumer})
    sidecar = {
        "vllm_internal_request_id": "r",
        "client_request_id": "r",
        "sample_index": 0,
        "num_prompt_tokens": 5,
        "positions": KEPT,
        "token_ids": KEPT,
    }
    consumer.store.put("clean", [TAP], ROWS[None], sidecar)
    for request_id in "ab":
        sidecar = sidecar | {"vllm_internal_request_id": request_id}
        consumer.store._evicts = False
        consumer.store.put("two", [TAP], ROWS[None], sidecar)
    modules = SteeringModules()
    sources = Sources(lambda name, where: kept_run(capture, name, where), modules.get)
    points = dict.fromkeys(range(2), POINTS)
    model = SteeredModel(points, WIDTH, torch.bfloat16, sources=sources)
    found = SteeringAdmission(model, modules)
    parsed = found.parse_named({"vectors": {"post_attn": {1: ONE}}})
    modules.register("tone", Module(found.checked(parsed)))
    return found


def replaced(positions: Any, source: Any, **keys: Any) -> Any:
    entry = {"op": "replace", "positions": positions, "from": source, **keys}
    tiers = admit(admission(), steering_vectors={"post_attn": {1: entry}})
    (one,) = tiers.base.operations
    return one


@given(st.permutations(range(len(KEPT))), st.booleans())
def test_rows_arrive_exactly_and_in_the_order_of_positions(
    order: list[int], backwards: bool
) -> None:
    sources = [KEPT[n] for n in order]
    if backwards:
        sources = [position - 5 for position in sources]
    one = replaced([0, 1, 2, 3], {"run": "clean", "positions": sources})
    rows = torch.from_numpy(one.vector.copy()).reshape(-1, WIDTH)
    assert torch.equal(rows.to(torch.bfloat16), ROWS[order])
    assert one.num_rows == len(KEPT)


def test_a_runs_positions_are_those_of_the_entry_by_default() -> None:
    one = replaced([4], {"run": "clean"}, alpha=0.5, mask={"indices": [1, 3]})
    assert np.array_equal(one.vector, ROWS[3].float().numpy())
    assert one.details.alpha == 0.5
    assert one.details.array("mask").tolist() == [0.0, 1.0, 0.0, 1.0]
    single = replaced([0, 3], {"run": "clean", "positions": [1]})
    assert single.num_rows == 0 and single.positions == ((0, 1), (3, 4))


def test_zeros_and_modules_are_sources_too() -> None:
    assert not replaced([1], "zeros").vector.any()
    assert replaced([1], "tone").vector.tolist() == ONE


@pytest.mark.parametrize(
    ("positions", "source", "words"),
    [
        ([1], {"run": "gone"}, "no run is kept under the name 'gone'"),
        ([1], {"run": "two"}, "has 2"),
        ([3], {"run": "clean"}, "no row at position 3"),
        ([1], {"run": "clean", "positions": [5]}, "no row at position 5"),
        ([1], {"run": "clean", "positions": [-6]}, "no row at position -1"),
        ([1], {"run": "clean", "positions": "all"}, "positions of the prompt"),
        ([1], {"run": "clean", "positions": []}, "must be a list"),
        (None, {"run": "clean"}, "name the positions"),
        ([0, 1], {"run": "clean", "positions": [0, 1, 2]}, "2 positions for 3 rows"),
        ([1], {"run": "clean", "layer": 1}, "must be"),
        ([1], {"run": 3}, "must be"),
        ([1], 3, "must be"),
        ([1], "rude", "no steering module"),
    ],
)
def test_sources_that_are_not_there_are_refused(
    positions: Any, source: Any, words: str
) -> None:
    errors = SteeringValidationError, CaptureValidationError
    with pytest.raises(errors, match=words) as found:
        replaced(positions, source)
    assert "steering_vectors.post_attn.1" in str(found.value.parameter)


@pytest.mark.parametrize(
    ("layer", "entry", "words"),
    [
        (0, {"op": "replace", "from": {"run": "clean"}}, "no rows at post_attn"),
        (0, {"op": "replace", "from": "tone"}, "no vector at post_attn of layer 0"),
        (1, {"op": "replace", "from": "zeros", "vector": ONE}, "either from"),
        (1, {"op": "add", "from": "zeros", "vector": ONE}, "from goes with"),
        (1, {"op": "replace", "from": "zeros", "mask": {"indices": [4]}}, "0 to 3"),
        (1, {"op": "replace", "from": "zeros", "mask": {"indices": []}}, "0 to 3"),
    ],
)
def test_entries_that_cannot_be_are_refused(layer: int, entry: Any, words: str) -> None:
    entry = {"positions": [0], **entry}
    with pytest.raises(SteeringValidationError, match=words):
        admit(admission(), steering_vectors={"post_attn": {layer: entry}})


def test_a_lease_of_a_name_that_is_not_kept_is_none() -> None:
    capture: Any = SimpleNamespace(
        consumers=lambda: {"patch_source": PatchSourceConsumer(None, {})}
    )
    with leased(capture, "gone"), pytest.raises(CaptureValidationError, match="gone"):
        kept_run(capture, "gone")


def test_heads_are_cut_from_rows_and_not_from_the_mask_of_these_heads() -> None:
    entry = {"vectors": np.arange(4)[None], "mask": np.array([1, 1, 0, 0])}
    cut = Heads([1, 0], PointShape(4, 2)).cut(entry)
    assert cut["vectors"].tolist() == [[2, 3, 0, 1]]
    assert cut["mask"].tolist() == [1, 1, 0, 0]
