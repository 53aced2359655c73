# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker.top_tokens import GROUP, best_of, largest, lens_arrays


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


@given(
    columns=st.lists(st.integers(3, 9), min_size=1, max_size=4),
    k=st.integers(0, 3),
    tokens=st.lists(st.integers(0, 11), max_size=3),
    levels=st.integers(2, 1000),
    seed=st.integers(0, 99),
)
def test_the_best_of_shards_are_those_of_the_whole(
    columns: list[int], k: int, tokens: list[int], levels: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(levels, (3, sum(columns)), generator=draw).bfloat16()
    rows[1, : columns[0]] = -torch.inf
    rows[2, seed % sum(columns)] = torch.nan
    asked = tuple(token % sum(columns) for token in tokens)
    shards, first = [], 0
    for own in rows.split(columns, dim=1):
        shards.append(best_of(own, k, asked, first))
        first += own.shape[1]
    arrays = lens_arrays(torch.stack(shards).numpy(), k)
    found = {name: torch.from_numpy(one) for name, one in arrays.items()}
    logs = rows.double().log_softmax(-1)
    expected = {}
    if k:
        ids = found["token_ids"].long()  # Any of those equal to the smallest.
        assert all(len(set(row)) == k for row in ids.tolist())
        assert ids[:2, 0].tolist() == rows[:2].argmax(dim=-1).tolist()
        assert rows.gather(1, ids)[:2].equal(rows.topk(k, dim=-1).values[:2])
        expected["logprobs"] = logs.gather(1, ids)
    if asked:
        expected["token_logprobs"] = logs[:, asked]
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one.float(), rtol=0, atol=1e-4, equal_nan=True
        )
