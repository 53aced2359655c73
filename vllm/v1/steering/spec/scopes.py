# SPDX-License-Identifier: Apache-2.0
"""Assigns entries whose conditions hold for later tokens to their tier."""

from collections.abc import Mapping, Sequence

from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation, on_prompt
from vllm.v1.steering.spec.parse import Parsed


def by_tier(parsed: Mapping[str, Parsed]) -> dict[str, Sequence[Operation]]:
    """The operations by tier; those for generated tokens only move to `decode`.

    Args:
        parsed: parsed tiers by name.

    Raises:
        SteeringValidationError: an entry could never act, or acts on tokens for which
            its condition is undecided.

    """
    found = {tier: list(one.operations) for tier, one in parsed.items()}
    for tier in ("base", "prefill"):
        for one in found.get(tier, []):
            scope = "token" if one.details.when is None else one.details.when.scope
            if scope == "prompt" and tier == "prefill":
                raise fail(
                    'when.scope: an entry with the scope "prompt" acts on generated '
                    "tokens; move the one at "
                    f"{one.hook} of layer {one.layer} to decode_steering_vectors, or "
                    "decode_vectors",
                    "when.scope",
                    scope,
                )
        if tier in found:
            found[tier] = [_latched_in_prompt(one) for one in found[tier]]
    later = [one for one in found.get("base", []) if _is_decided_by_prompt(one)]
    if later:
        found["base"] = [o for o in found["base"] if not _is_decided_by_prompt(o)]
        found["decode"] = [*later, *found.get("decode", [])]
    return {
        tier: found[tier] for tier in ("base", "prefill", "decode") if tier in found
    }


def _latched_in_prompt(one: Operation) -> Operation:
    """The operation, decided at prompt tokens too if its scope is `rest`."""
    when = one.details.when
    if when is None or when.scope != "rest":
        return one
    if when.tap == one.tap:
        raise fail(
            "when: the tokens of a prompt are computed together, so whether an earlier "
            f"one has fired is not known yet at {one.hook} of layer {one.layer}, where "
            "the probe reads; read at an earlier hook point, or let the entry act on "
            "generated tokens only, in decode_steering_vectors or decode_vectors",
            "when.scope",
            "rest",
        )
    return on_prompt(one)


def _is_decided_by_prompt(one: Operation) -> bool:
    return one.details.when is not None and one.details.when.scope == "prompt"
