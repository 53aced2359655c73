# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker.kinds import WIDTH_PARTS, products_in_parts


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_products_in_parts_are_products(
    num_rows: int, num_vectors: int, each: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, vectors = (
        torch.randn(count, WIDTH_PARTS * each, generator=draw)
        for count in (num_rows, num_vectors)
    )
    expected = (rows.double() @ vectors.double().T).float()
    torch.testing.assert_close(products_in_parts(rows, vectors), expected)
