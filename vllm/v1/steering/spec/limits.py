# SPDX-License-Identifier: Apache-2.0
"""Limits on a request's steering as a whole: positions, sums, operations, memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.residual.bounds import counted
from vllm.v1.residual.spans import describe_positions, missed, most_at_once
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.conditions import MAX_CONDITIONS
from vllm.v1.steering.errors import fail
from vllm.v1.steering.features import MAX_CARRIED
from vllm.v1.steering.plan import Operation, SteeringTiers, operations_of, total
from vllm.v1.steering.spec.parse import Parsed, SteeredModel


def check_positions(
    tiers: SteeringTiers,
    names: Mapping[str, str],
    num_prompt: int,
    max_tokens: int | None,
) -> None:
    """Refuse positions at which the request cannot have a token of that tier.

    The last sampled token is not fed back: with P prompt tokens and at most N generated
    ones, positions are 0 to P+N-2.

    Args:
        tiers: the request's own tiers, without named modules.
        names: the parameters' names in messages, by tier.
        num_prompt: number of prompt tokens.
        max_tokens: most generated tokens; None for no limit.

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
        for one in operations_of(getattr(tiers, tier)):
            if one.positions is None:
                continue
            outside = missed(one.positions, num_prompt, possible)
            if outside is not None:
                at = f"{names[tier]}.{one.hook}.{one.layer}.positions"
                having = (
                    f"positions {possible[0]} to {possible[-1]}"
                    if possible
                    else "no position"
                )
                described = describe_positions(one.positions)
                where = described if described == "all_prompt" else outside
                raise fail(
                    f"{at}: no token is at {where}: {names[tier]} acts on {having}"
                    f" of this request, which has {counted(num_prompt, 'prompt token')}"
                    f" and max_tokens={max_tokens}",
                    at,
                    where,
                )


def check_reachable(tiers: SteeringTiers, names: Mapping[str, str], most: int) -> None:
    """Refuse positions that no request can reach, in vectors that are for several.

    Args:
        tiers: the global vectors, or those of a module.
        names: the parameters' names in messages, by tier.
        most: most tokens of a request.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    for tier, name in names.items():
        for one in operations_of(getattr(tiers, tier)):
            spans = one.positions or ()
            at = f"{name}.{one.hook}.{one.layer}.positions"
            if tier == "decode" and any(first < 0 for first, _ in spans):
                raise fail(
                    f"{at}: what counts from the prompt's end is a prompt token, and "
                    f"{name} acts on generated ones; move the entry to "
                    f"{names['prefill']}",
                    at,
                    describe_positions(one.positions),
                )
            for first, stop in spans:
                if first >= most or stop <= -most:
                    raise fail(
                        f"{at}: no request has a token at {first}, as this server "
                        f"allows {most} tokens (--max-model-len); leave it out",
                        at,
                        first,
                    )


MAX_OPERATIONS = 1024
"""Most operations of one tier other than plain additions; more if the model has more
sites than that with `--max-steering-ops` each."""

MAX_SPANS = 1 << 16
"""Most separate spans of positions in one tier."""

MAX_SELECTIONS = 1024
"""Most distinct sets of positions in one tier."""


def check_work(parsed: Parsed, name: str, model: SteeredModel) -> None:
    """Refuse a tier whose planning would slow down every step of the engine.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    count, most = len(parsed.operations), MAX_OPERATIONS
    if count > most:  # The hook points are counted only then.
        most = max(most, model.num_sites * model.max_operations)
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
            f"{name}: its entries have {len(selections)} distinct sets of positions, "
            f"and at most {MAX_SELECTIONS} are allowed; give those of one hook point "
            "as one entry with vectors",
            name,
            len(selections),
        )
    spans = sum(len(one.positions or ()) for one in parsed.operations)
    if spans > MAX_SPANS:
        raise fail(
            f"{name}: its positions form {spans} separate spans, and at most "
            f"{MAX_SPANS} are allowed; give contiguous positions",
            name,
            spans,
        )


def check_bank(tiers: SteeringTiers, room: int, parameter: str) -> None:
    """Refuse operations whose vectors exceed the device memory reserved for them.

    Args:
        tiers: tiers of a request, or the global ones.
        room: bytes available for the vectors.
        parameter: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    needed = tiers.bank_bytes
    if needed > room:
        raise fail(
            f"{parameter}: its operations have {needed / 2**20:.1f} MiB of vectors "
            f"(float32), and {room / 2**20:.1f} MiB are allowed; start the server with "
            "a larger --steering-bank-mib, or give fewer rows",
            parameter,
            needed,
        )


def check_operations(tiers: SteeringTiers, most: int, parameter: str) -> None:
    """Refuse more operations at one token and hook point than allowed.

    Operations with positions count where they may meet: a hundred entries at a hundred
    distinct tokens count as one.

    Args:
        tiers: all tiers of a request, or of the engine.
        most: the value of `--max-steering-ops`.
        parameter: the parameter's name in messages.

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
            count = len(these) - len(placed) + (most_at_once(placed) if placed else 0)
            if count > most:
                raise fail(
                    f"{parameter}: {count} operations may act on one token at {hook} "
                    f"of layer {layer}, and --max-steering-ops allows {most}; send "
                    "fewer, or at disjoint positions",
                    parameter,
                    count,
                )


def check_conditions(tiers: SteeringTiers, parameter: str) -> None:
    """Refuse more conditions, and activations of transcoders, than have columns.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    count = len(tiers.conditions)
    if count > MAX_CONDITIONS:
        raise fail(
            f"{parameter}: its entries have {count} distinct conditions, and at most "
            f"{MAX_CONDITIONS} are allowed; entries with equal conditions share one",
            parameter,
            count,
        )
    count = len(tiers.carried)
    if count > MAX_CARRIED:
        raise fail(
            f"{parameter}: its entries need {count} activations of transcoders, and at "
            f'most {MAX_CARRIED} are allowed; use "mode": "add" for some of them',
            parameter,
            count,
        )


class Overflow(NamedTuple):
    """A sum at one tap that the model's dtype cannot hold."""

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
    """Find the first tap at which the sum of several sets is not finite.

    Args:
        dtype: dtype of the residual stream.
        sets: in the order in which the tables add them: the engine's set, then a
            request's.

    """
    for phase in ("prefill", "decode"):
        parts = [p for one in sets for p in (one.base, getattr(one, phase))]
        for (layer, hook), vector in total(parts).items():
            largest = float(np.abs(vector).max())
            # Comparisons with NaN are false too.
            if not largest <= torch.finfo(dtype).max:
                return Overflow(phase, layer, hook, largest)
    return None


def check_sums(
    tiers: SteeringTiers, dtype: torch.dtype, parameter: str = "steering_vectors"
) -> None:
    """Refuse vectors whose sum at one token overflows the model's dtype.

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
    shared: Sequence[SteeringTiers],
    dtype: torch.dtype,
    bank_bytes: int,
    parameter: str,
) -> None:
    """Refuse a request whose vectors, with the global ones, are too large or too many.

    Args:
        tiers: the request's tiers.
        shared: each set of global vectors that may hold when the request arrives.
        dtype: dtype of the residual stream.
        bank_bytes: bytes for the vectors of all operations.
        parameter: the request's parameter, for the message.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    for one in shared:
        found = find_overflow(dtype, one, tiers) if one else None
        if found is not None:
            raise fail(
                f"{parameter}: with the engine's vectors, {found}. Use smaller vectors "
                "or scales; GET /v1/steering (get_steering offline) returns what the "
                "engine adds",
                parameter,
                found.largest,
            )
    taken = max((one.bank_bytes for one in shared), default=0)
    check_bank(tiers, bank_bytes - taken, parameter)


def check_with_requests(
    shared: SteeringTiers,
    in_flight: Iterable[SteeringTiers],
    dtype: torch.dtype,
) -> None:
    """Refuse global vectors whose sum with a request's vectors overflows the dtype.

    Args:
        shared: the global vectors after the change.
        in_flight: the configurations of the requests in flight.
        dtype: dtype of the residual stream.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    check_sums(shared, dtype, "vectors")
    for tiers in {one.digest: one for one in in_flight}.values():
        found = find_overflow(dtype, shared, tiers)
        if found is not None:
            raise fail(
                f"vectors: with those of a request in flight, {found}. Use "
                "smaller vectors or scales, or wait until the request has finished",
                "vectors",
                found.largest,
            )
