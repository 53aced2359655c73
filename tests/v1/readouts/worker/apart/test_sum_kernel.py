# SPDX-License-Identifier: Apache-2.0
"""The kernel that sums rows, compared with float64: on a GPU, or interpreted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.triton_utils import HAS_TRITON
from vllm.v1.readouts.worker import sum_kernel
from vllm.v1.readouts.worker.sum_kernel import sums

pytestmark = [
    pytest.mark.usefixtures("no_engine"),
    pytest.mark.skipif(not HAS_TRITON, reason="neither a GPU nor the interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAGED = 900


@given(
    spans=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 800)), min_size=1),
    width=st.sampled_from([1, 96, 128, 200]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    parts=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_sums_are_those_of_float64(
    spans: list[tuple[int, int]], width: int, dtype: torch.dtype, parts: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    spans = spans[:3]
    rows = torch.randn(STAGED, width, generator=draw).to(DEVICE, dtype)
    with pytest.MonkeyPatch.context() as patch:
        programs = parts * len(spans) * -(-width // sum_kernel.BLOCK_WIDTH)
        patch.setattr(sum_kernel, "PROGRAMS", programs)
        found = sums(rows, np.array(spans, dtype=np.int64).T.copy())
    for (first, count), own in zip(spans, found, strict=True):
        expected = rows[first : first + count].double().sum(dim=0).float()
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-5)


def test_a_row_that_overflowed_is_seen() -> None:
    rows = torch.ones(300, 130, device=DEVICE)
    rows[299, 129], rows[0, 5] = float("nan"), float("inf")
    found = sums(rows, np.array([[0], [300]]))[0]
    assert found[129].isnan() and found[5] == float("inf")
    assert (found[:5] == 300).all()
