# SPDX-License-Identifier: Apache-2.0
"""What is wrong with steering as a whole, though each vector is right."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.steering import positions
from vllm.v1.steering.conditions import MAX_CONDITIONS
from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation
from vllm.v1.steering.plan import SteeringTiers, Tap, conditions_of, total
from vllm.v1.steering.spec.parse import Parsed, SteeredModel


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
            if one.positions is None:
                continue
            missed = positions.missed(one.positions, num_prompt, possible)
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


MAX_OPERATIONS = 1024
"""Of one tier, beyond adding vectors at every token; more where a model has more sites
than that allows `--max-steering-ops` each."""

MAX_SPANS = 1 << 16
"""Of positions that do not follow one another, in one tier."""

MAX_SELECTIONS = 1024
"""Different sets of positions in one tier."""


def check_work(parsed: Parsed, name: str, model: SteeredModel) -> None:
    """Refuse a tier that would cost every step of the engine too much.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    count = len(parsed.operations)
    most = max(MAX_OPERATIONS, model.num_sites * model.max_operations)
    if count > most:
        raise fail(
            f"{name}: at most {most} entries may do more than add a vector "
            "at every token; add up those that only add, and give those at single "
            "positions as one entry with vectors",
            name,
            count,
        )
    selections = {one.positions for one in parsed.operations}
    if len(selections) > MAX_SELECTIONS:
        raise fail(
            f"{name}: its entries have {len(selections)} different sets of positions, "
            f"and at most {MAX_SELECTIONS} may be; give those of one hook point as "
            "one entry with vectors",
            name,
            len(selections),
        )
    spans = sum(len(one.positions or ()) for one in parsed.operations)
    if spans > MAX_SPANS:
        raise fail(
            f"{name}: its positions are {spans} stretches of tokens, and at most "
            f"{MAX_SPANS} may be; give positions that follow one another",
            name,
            spans,
        )


def check_bank(tiers: SteeringTiers, room: int, parameter: str) -> None:
    """Refuse operations whose vectors can never be on the device together.

    Args:
        tiers: of a request, or of all.
        room: bytes that they may take.
        parameter: for the message.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    needed = tiers.bank_bytes
    if needed > room:
        raise fail(
            f"{parameter}: its operations have {needed / 2**20:.1f} MiB of vectors "
            f"(float32), and {room / 2**20:.1f} MiB may be; start the server with a "
            "larger --steering-bank-mib, or give fewer rows",
            parameter,
            needed,
        )


def check_operations(tiers: SteeringTiers, most: int, parameter: str) -> None:
    """Refuse more operations at one token and hook point than allowed.

    Those with positions count where they may meet: a hundred entries at a hundred
    tokens are one.

    Args:
        tiers: all that a request, or the engine, does.
        most: `--max-steering-ops`.
        parameter: for the message.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    check_conditions(tiers, parameter)
    for operations in (tiers.prefill_operations, tiers.decode_operations):
        at: dict[Tap, list[Operation]] = {}
        for one in operations:
            at.setdefault(one.tap, []).append(one)
        for (layer, hook), these in at.items():
            placed = [one.positions for one in these if one.positions is not None]
            count = len(these) - len(placed) + positions.most_at_once(placed)
            if count > most:
                raise fail(
                    f"{parameter}: {count} operations may act on one token at {hook} "
                    f"of layer {layer}, and --max-steering-ops allows {most}; send "
                    "fewer, or at positions that do not meet",
                    parameter,
                    count,
                )


def check_conditions(tiers: SteeringTiers, parameter: str) -> None:
    """Refuse more conditions than there is room for their decisions.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    count = len(conditions_of(tiers))
    if count > MAX_CONDITIONS:
        raise fail(
            f"{parameter}: its entries have {count} different conditions, and at most "
            f"{MAX_CONDITIONS} may be; entries with equal ones share one",
            parameter,
            count,
        )


class Overflow(NamedTuple):
    """A sum at one place that the model's dtype cannot hold."""

    phase: str
    layer: int
    hook: str
    largest: float
    """The largest magnitude; infinite or NaN where float32 cannot hold it either."""

    def __str__(self) -> str:
        return (
            f"what is added to {self.phase} tokens at {self.hook} of layer "
            f"{self.layer} must be finite in the model's dtype; the largest magnitude "
            f"of the sum is {self.largest}"
        )


def find_overflow(dtype: torch.dtype, *sets: SteeringTiers) -> Overflow | None:
    """The first place at which the sum of some sets is not finite, if any.

    Args:
        dtype: of the residual stream.
        sets: in the order in which the tables add them: the engine's, a request's.

    """
    for phase in ("prefill", "decode"):
        parts = [p for one in sets for p in (one.base, getattr(one, phase))]
        for (layer, hook), vector in total(parts).items():
            largest = float(np.abs(vector).max())
            if not largest <= torch.finfo(dtype).max:  # NaN compares false too.
                return Overflow(phase, layer, hook, largest)
    return None


def check_sums(
    tiers: SteeringTiers, dtype: torch.dtype, parameter: str = "steering_vectors"
) -> None:
    """Refuse vectors whose sum at one token is more than the model can hold.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    found = find_overflow(dtype, tiers)
    if found is not None:
        raise fail(
            f"{parameter}: {found}. Use smaller vectors or scales",
            parameter,
            found.largest,
        )


def check_with_shared(
    tiers: SteeringTiers,
    shared: Iterable[SteeringTiers],
    dtype: torch.dtype,
    parameter: str,
) -> None:
    """Refuse a request whose vectors and the engine's are too much together.

    Args:
        tiers: of the request.
        shared: each set of global vectors that may hold when it arrives.
        dtype: of the residual stream.
        parameter: of the request, for the message.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    for one in shared:
        found = find_overflow(dtype, one, tiers) if one else None
        if found is not None:
            raise fail(
                f"{parameter}: {too_much_with_shared(found)}",
                parameter,
                found.largest,
            )


def too_much_with_shared(found: Overflow) -> str:
    """The message for a request, without the parameter's name."""
    return (
        f"with the engine's vectors, {found}. Use smaller vectors or scales; "
        "GET /v1/steering (get_steering offline) tells what the engine adds"
    )


def check_with_requests(
    shared: SteeringTiers,
    under_way: Iterable[SteeringTiers],
    dtype: torch.dtype,
) -> None:
    """Refuse global vectors that are too much together with a request's.

    Args:
        shared: the global vectors as they would be.
        under_way: what the requests that are under way are steered by.
        dtype: of the residual stream.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    check_sums(shared, dtype, "vectors")
    for tiers in {one.digest: one for one in under_way}.values():
        found = find_overflow(dtype, shared, tiers)
        if found is not None:
            raise fail(
                f"vectors: with those of a request that is under way, {found}. Use "
                "smaller vectors or scales, or wait until the request has ended",
                "vectors",
                found.largest,
            )
