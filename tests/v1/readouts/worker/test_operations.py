# SPDX-License-Identifier: Apache-2.0
"""Reduced rows, wherever in staging they lie, against float64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.readouts.worker.operations import reduce_rows

TOKENS = np.arange(50)[:, None]
PLACES = {
    "taps side by side": TOKENS + np.array([0, 100, 200]),
    "one tap": TOKENS + np.array([7]),
    "gaps that differ": TOKENS + np.array([0, 100, 300]),
    "descending": TOKENS + np.array([300, 100]),
    "the same rows": TOKENS + np.array([3, 3]),
    "scattered tokens": 3 * TOKENS + np.array([0, 200, 400]),
    "one token": np.array([[5, 9]]),
}


@pytest.mark.parametrize("how", ["sum", "mean", "max", "last"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_rows_are_reduced_over_tokens(places: Any, how: str) -> None:
    staging = torch.randn(600, 16).bfloat16()
    entries = [SimpleNamespace(rows=places + shift) for shift in (0, 20)]
    job: Any = SimpleNamespace(key=(0, how), entries=entries, part=None)
    found = reduce_rows(job, staging, 11)["rows"]
    assert found.dtype == torch.float32
    for entry, got in zip(entries, found, strict=True):
        rows = staging[torch.from_numpy(entry.rows.T + 11)].double()
        sums = rows.sum(1)
        wanted = {"max": rows.amax(1), "last": rows[:, -1]}.get(how, sums)
        assert (got - wanted).abs().max() < 1e-4
