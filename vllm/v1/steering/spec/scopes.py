# SPDX-License-Identifier: Apache-2.0
"""Assigns entries whose conditions hold for later tokens to their tier."""

from collections.abc import Mapping, Sequence

from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation
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
            if scope == "rest" or (scope == "prompt" and tier == "prefill"):
                raise fail(
                    f'when.scope: an entry with the scope "{scope}" acts on generated '
                    "tokens; move the one at "
                    f"{one.hook} of layer {one.layer} to decode_steering_vectors, or "
                    "decode_vectors",
                    "when.scope",
                    scope,
                )
    later = [one for one in found.get("base", []) if _is_decided_by_prompt(one)]
    if later:
        found["base"] = [o for o in found["base"] if not _is_decided_by_prompt(o)]
        found["decode"] = [*later, *found.get("decode", [])]
    return {
        tier: found[tier] for tier in ("base", "prefill", "decode") if tier in found
    }


def _is_decided_by_prompt(one: Operation) -> bool:
    return one.details.when is not None and one.details.when.scope == "prompt"
