# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.readouts.worker import shards
from vllm.v1.readouts.worker.head import largest
from vllm.v1.readouts.worker.shards import local_logits_of, shard_values


def heads(vocabulary: int, ranks: int) -> list[Any]:
    """The modules of all ranks, the last of which have padding."""
    size = -(-vocabulary // ranks)
    firsts = [min(rank * size, vocabulary) for rank in range(ranks)]
    ends = [min(first + size, vocabulary) for first in firsts]
    return [
        SimpleNamespace(
            shard_indices=SimpleNamespace(
                org_vocab_start_index=first,
                org_vocab_end_index=end,
                num_org_vocab_padding=size - (end - first),
            )
        )
        for first, end in zip(firsts, ends, strict=True)
    ]


def of_every_rank(logits: torch.Tensor, ranks: int, top_k: int, tokens: Any) -> Any:
    """The values on each rank: first what it sends, then with what all have sent."""
    sent: list[torch.Tensor] = []

    class Sent(Exception):
        pass

    def send(mine: torch.Tensor, dim: int) -> torch.Tensor:
        sent.append(mine)
        raise Sent

    every = heads(logits.shape[1], ranks)
    size = -(-logits.shape[1] // ranks)
    padded = torch.nn.functional.pad(
        logits, (0, ranks * size - logits.shape[1]), value=9e9
    )
    parts = padded.split(size, dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "tensor_model_parallel_all_gather", send)
        for head, part in zip(every, parts, strict=True):
            with pytest.raises(Sent):
                shard_values(head, part.clone(), top_k, tokens, largest)
        patch.setattr(
            shards,
            "tensor_model_parallel_all_gather",
            lambda mine, dim: torch.cat(sent, dim=dim),
        )
        return [
            shard_values(head, part.clone(), top_k, tokens, largest)
            for head, part in zip(every, parts, strict=True)
        ]


@given(
    vocabulary=st.integers(8, 200),
    ranks=st.integers(2, 4),
    top_k=st.integers(0, 8),
    named=st.booleans(),
    steps=st.integers(2, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_ranks_have_the_values_of_the_whole_vocabulary(
    vocabulary: int,
    ranks: int,
    top_k: int,
    named: bool,
    steps: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    # Few values, so that many are equal.
    logits = torch.randint(0, steps, (3, vocabulary), generator=draw).to(dtype) / 4
    tokens = torch.randint(0, vocabulary, (4,), generator=draw) if named else None
    logs = logits.float().log_softmax(dim=-1)
    for found in of_every_rank(logits, ranks, top_k, tokens):
        names = {"token_ids", "logprobs"} if top_k else set()
        assert found.keys() == names | ({"token_logprobs"} if named else set())
        if top_k:
            best, ids = largest(logs, top_k)
            torch.testing.assert_close(found["logprobs"], best)
            chosen = logs.gather(1, found["token_ids"].long())
            torch.testing.assert_close(chosen, found["logprobs"])
            assert torch.equal(found["token_ids"][:, 0].long(), ids[:, 0])
            assert all(len(set(row)) == top_k for row in found["token_ids"].tolist())
        if tokens is not None:
            torch.testing.assert_close(found["token_logprobs"], logs[:, tokens])


class Plain:
    lm_head = SimpleNamespace(tp_size=2)

    def compute_logits(self, rows: Any) -> str:
        return "whole"

    def compute_logits_local(self, rows: Any) -> str:
        return "part"


class Changed(Plain):
    def compute_logits(self, rows: Any) -> str:
        return "changed"


class OneRank(Plain):
    lm_head = SimpleNamespace(tp_size=1)


def test_only_logits_that_the_model_does_not_change_later_are_local() -> None:
    local = local_logits_of(Plain())
    assert local is not None and local(torch.zeros(1)) == "part"
    assert local_logits_of(Changed()) is None
    assert local_logits_of(OneRank()) is None
    assert local_logits_of(SimpleNamespace()) is None
