# SPDX-License-Identifier: Apache-2.0
"""Whether a rank's part of the vocabulary can be used, with a group of one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.readouts.worker import head
from vllm.v1.readouts.worker.head import Shard

TOKENS, PADDED, WIDTH = 5, 8, 3
WEIGHT = torch.randn(PADDED, WIDTH, generator=torch.Generator().manual_seed(0))


def processor(
    embedding: Any, rows: torch.Tensor, bias: torch.Tensor | None, skip_gather: bool
) -> torch.Tensor:
    """A `LogitsProcessor`."""
    assert skip_gather
    return rows @ WEIGHT.T + (0 if bias is None else bias)


def compared(changed: Any, bias: torch.Tensor | None = None, least: int = 0) -> Any:
    """The shard of a model that makes `changed` of its logits; None if it has none."""
    embedding = SimpleNamespace(
        bias=bias,
        shard_indices=SimpleNamespace(
            org_vocab_start_index=0, org_vocab_end_index=TOKENS
        ),
        num_embeddings_per_partition=PADDED,
        org_vocab_size=TOKENS - least,
        tp_size=1,
    )

    def compute_logits(rows: torch.Tensor) -> torch.Tensor:
        logits = processor(embedding, rows, bias, skip_gather=True)[:, :TOKENS]
        return changed(logits)

    model = SimpleNamespace(compute_logits=compute_logits)
    one: Any = processor
    return Shard.of(model, [one], embedding, torch.empty(0, WIDTH))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(all_gather=lambda tensor, dim: tensor)
    monkeypatch.setattr(head, "get_tp_group", lambda: group)


@pytest.mark.parametrize("bias", [None, torch.arange(8.0)])
def test_a_shard_has_its_rank_s_logits(bias: torch.Tensor | None) -> None:
    shard = compared(lambda logits: logits, bias)
    rows = torch.randn(4, WIDTH)
    assert shard.logits(rows).equal(processor(None, rows, bias, True)[:, :TOKENS])
    assert (shard.first, shard.least) == (0, TOKENS)


def test_logits_that_the_model_changes_later_are_gathered() -> None:
    masked = torch.tensor([0, 0, 0, -torch.inf, 0])
    assert compared(lambda logits: logits + masked) is None
    assert compared(lambda logits: None) is None
    assert compared(lambda logits: logits, least=TOKENS) is None
