# SPDX-License-Identifier: Apache-2.0
"""Lens values where each tensor-parallel rank has a part of the vocabulary.

Ranks exchange candidates and the logarithm of a sum instead of logits: for a vocabulary
of 128,256 and ten tokens 84 bytes of a row instead of 513 kB.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm.distributed import tensor_model_parallel_all_gather
from vllm.v1.readouts.worker.kinds import Arrays

Largest = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def local_logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The method with which a rank computes the logits of its part of the vocabulary.

    None if the model has none, or on one rank. A class that overrides `compute_logits`
    alone may change the logits there.
    """
    if getattr(getattr(model, "lm_head", None), "tp_size", 1) == 1:
        return None
    for kind in type(model).__mro__:
        if "compute_logits_local" in vars(kind):
            found: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits_local
            return found
        if "compute_logits" in vars(kind):
            return None
    return None


def shard_values(
    head: Any,
    logits: torch.Tensor,
    top_k: int,
    tokens: torch.Tensor | None,
    largest: Largest,
) -> Arrays:
    """As `lens_values`, of this rank's logits; a collective.

    Args:
        head: the module `lm_head`.
        logits: `[R, shard]`, with padding; the padding is overwritten.
        top_k: number of tokens.
        tokens: the ids whose log-probabilities are wanted, int64.
        largest: returns the k largest of each row and their indices.

    """
    shard = head.shard_indices
    if shard.num_org_vocab_padding:
        logits[:, -shard.num_org_vocab_padding :] = -float("inf")
    logits = logits.float()
    parts = [logits.logsumexp(dim=-1, keepdim=True)]
    count = min(top_k, logits.shape[1])
    if count:
        best, ids = largest(logits, count)
        ids = (ids + shard.org_vocab_start_index).to(torch.int32)
        parts += [best, ids.view(torch.float32)]
    if tokens is not None:
        parts.append(_named(logits, tokens, shard))
    sizes = [part.shape[1] for part in parts]
    mine = torch.cat(parts, dim=1)[:, None]  # [R, 1, numbers]
    every = tensor_model_parallel_all_gather(mine, dim=1).split(sizes, dim=-1)
    total = every[0].logsumexp(dim=1)  # [R, 1]
    found: Arrays = {}
    if count:
        # Ranks are in the order of their ids, and so are equal candidates.
        values, where = largest(every[1].flatten(1), top_k)
        ids = every[2].contiguous().view(torch.int32).flatten(1)
        found |= {"token_ids": ids.gather(1, where), "logprobs": values - total}
    if tokens is not None:
        found["token_logprobs"] = every[-1].amax(dim=1) - total
    return found


def _named(logits: torch.Tensor, tokens: torch.Tensor, shard: Any) -> torch.Tensor:
    """The logits of `tokens`, minus infinity where another rank has them."""
    first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    own = (tokens >= first) & (tokens < end)
    values = logits[:, torch.where(own, tokens - first, 0)]
    return values.masked_fill(~own, -float("inf"))
