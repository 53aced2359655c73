# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a batch in which some requests name the tokens.

A sweep's requests do. The V1 runner's sampler returns one tensor for the batch, and
would leave the most likely tokens out of it that others have asked for. V2 has both.
"""

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from vllm.v1.outputs import LogprobsTensors


def beside_named(
    top: LogprobsTensors, named: LogprobsTensors, rows: Iterable[int]
) -> LogprobsTensors:
    """Join the most likely tokens, and in these rows those that are named.

    Args:
        top: `[requests, 1 + k]`, the sampled tokens first.
        named: `[requests, 1 + m]`, likewise.
        rows: indices of the requests that name tokens.

    """
    tokens, named_tokens = top.logprob_token_ids, named.logprob_token_ids
    width = max(tokens.shape[1], named_tokens.shape[1])
    index = torch.tensor(list(rows), device=tokens.device)

    def joined(first: torch.Tensor, second: torch.Tensor, empty: float) -> torch.Tensor:
        first, second = (
            pad(one, (0, width - one.shape[1]), value=empty) for one in (first, second)
        )
        return first.index_copy(0, index, second[index])

    return LogprobsTensors(
        joined(tokens, named_tokens, 0),
        joined(top.logprobs, named.logprobs, float("-inf")),
        top.selected_token_ranks,
    )
