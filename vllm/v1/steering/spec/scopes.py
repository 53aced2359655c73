# SPDX-License-Identifier: Apache-2.0
"""Assigns entries whose conditions hold for later tokens to their tier."""

from collections.abc import Mapping, Sequence

from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import Operation, on_prompt
from vllm.v1.steering.spec.parse import Parsed


def by_tier(
    parsed: Mapping[str, Parsed], fields: Mapping[str, str]
) -> dict[str, Sequence[Operation]]:
    """The operations by tier; those for generated tokens only move to `decode`.

    Args:
        parsed: parsed tiers by name.
        fields: the name of each tier's field, for messages.

    Raises:
        SteeringValidationError: an entry could never act, or acts on tokens for which
            its condition is undecided.

    """
    found = {tier: list(one.operations) for tier, one in parsed.items()}
    for tier in ("base", "prefill"):
        for one in found.get(tier, []):
            scope = "token" if one.details.when is None else one.details.when.scope
            if scope == "prompt" and tier == "prefill":
                parameter = _parameter(one, fields[tier])
                raise fail(
                    f'{parameter}: an entry with the scope "prompt" acts on generated '
                    f"tokens; move it to {fields['decode']}",
                    parameter,
                    scope,
                )
        if tier in found:
            found[tier] = [
                _latched_in_prompt(o, fields[tier], fields["decode"])
                for o in found[tier]
            ]
    later = [one for one in found.get("base", []) if _is_decided_by_prompt(one)]
    if later:
        found["base"] = [o for o in found["base"] if not _is_decided_by_prompt(o)]
        found["decode"] = [*later, *found.get("decode", [])]
    return {
        tier: found[tier] for tier in ("base", "prefill", "decode") if tier in found
    }


def _parameter(one: Operation, field: str) -> str:
    return f"{field}.{one.hook}.{one.layer}.when.scope"


def _latched_in_prompt(one: Operation, field: str, decode: str) -> Operation:
    """The operation, decided at prompt tokens too if its scope is `rest`.

    `field` is the name of its field, and `decode` the one of generated tokens.
    """
    when = one.details.when
    if when is None or when.scope != "rest":
        return one
    if when.tap == one.tap:
        parameter = _parameter(one, field)
        raise fail(
            f"{parameter}: the tokens of a prompt are computed together, so whether an "
            "earlier one has fired is not known yet at the hook point at which the "
            "probe reads; read at an earlier hook point, or let the entry act on "
            f"generated tokens only, in {decode}",
            parameter,
            "rest",
        )
    return on_prompt(one)


def _is_decided_by_prompt(one: Operation) -> bool:
    return one.details.when is not None and one.details.when.scope == "prompt"
