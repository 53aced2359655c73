# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a request's steering as a whole, though each vector is right."""

from collections.abc import Mapping

import numpy as np
import torch

from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation
from vllm.v1.steering.plan import SteeringTiers, total


def check_positions(
    tiers: SteeringTiers,
    names: Mapping[str, str],
    num_prompt: int,
    max_tokens: int | None,
) -> None:
    """Refuse positions at which the request cannot have a token of their tier.

    The last sampled token is never fed back: with P prompt tokens and at most N
    generated ones, positions are 0 to P+N-2.

    Args:
        tiers: as the request gives them, without named vectors.
        names: by tier, the parameter's name in messages.
        num_prompt: tokens of the prompt.
        max_tokens: the most that are generated; None for any number.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    stop = 2**31 if max_tokens is None else num_prompt + max(max_tokens, 1) - 1
    ranges = {
        "base": range(stop),
        "prefill": range(num_prompt),
        "decode": range(num_prompt, stop),
    }
    for tier, possible in ranges.items():
        packed = getattr(tiers, tier)
        for one in packed.operations if packed is not None else ():
            missed = _missed(one, num_prompt, possible)
            if missed is not None:
                at = f"{names[tier]}.{one.hook}.{one.layer}.positions"
                having = (
                    f"positions {possible[0]} to {possible[-1]}"
                    if possible
                    else "no position"
                )
                raise fail(
                    f"{at}: nothing is ever at {missed}: {names[tier]} acts on {having}"
                    f" of this request, which has {num_prompt} prompt tokens and "
                    f"max_tokens={max_tokens}",
                    at,
                    missed,
                )


def _missed(one: Operation, num_prompt: int, possible: range) -> int | None:
    """A position of an operation that no token of `possible` has, if any."""
    if one.positions is None:
        return None
    absolute = {p: p if p >= 0 else num_prompt + p for p in one.positions}
    missed = [p for p, place in absolute.items() if place not in possible]
    counts_back = one.positions == tuple(range(-len(one.positions), 0))
    if counts_back and len(missed) < len(one.positions):
        return None  # The last k tokens of a prompt that has fewer: all of them.
    return missed[0] if missed else None


def check_sums(tiers: SteeringTiers, dtype: torch.dtype) -> None:
    """Refuse vectors whose sum at one token is more than the model can hold.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    for phase, of_phase in (("prefill", tiers.prefill), ("decode", tiers.decode)):
        parts = [part for part in (tiers.base, of_phase) if part is not None]
        for (layer, hook), vector in total(parts).items():
            largest = float(np.abs(vector).max())
            if not largest <= torch.finfo(dtype).max:
                raise fail(
                    f"steering_vectors: what is added to {phase} tokens at {hook} of "
                    f"layer {layer} must be finite in {dtype}; the largest magnitude "
                    f"of the sum is {largest}. Use smaller vectors or scales",
                    "steering_vectors",
                    largest,
                )
