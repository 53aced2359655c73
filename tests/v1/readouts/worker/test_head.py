# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker.head import GROUP, largest


@given(
    groups=st.integers(1, 40),
    rest=st.sampled_from([0, 0, 7]),
    k=st.integers(1, 9),
    levels=st.integers(2, 1000),
    seed=st.integers(0, 99),
)
def test_the_largest_are_those_of_topk(
    groups: int, rest: int, k: int, levels: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = 3, groups * GROUP + rest
    # Few levels, so that there are ties, within groups and between them.
    rows = torch.randint(levels, shape, generator=draw).float()
    rows[1, ::5] = -torch.inf
    rows[2, seed] = torch.nan
    values, indices = largest(rows, k)
    expected = rows.topk(k, dim=-1).values
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    taken = rows.gather(1, indices)
    torch.testing.assert_close(taken, values, rtol=0, atol=0, equal_nan=True)
    assert all(len(set(row)) == k for row in indices.tolist())
    # Greedy sampling takes the first of equal logits.
    assert indices[:2, 0].tolist() == rows[:2].argmax(dim=-1).tolist()
    tied = values[:2, 1:] == values[:2, :-1]
    assert (indices[:2, 1:] > indices[:2, :-1])[tied].all()
