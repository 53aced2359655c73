# SPDX-License-Identifier: Apache-2.0
"""What a change makes of the global vectors."""

from vllm.v1.steering.plan import PackedVectors, SteeringTiers, pack


def merged(old: SteeringTiers, change: SteeringTiers, replace: bool) -> SteeringTiers:
    """The global vectors after a change: those given replace those at their places.

    Args:
        old: the global vectors before.
        change: what is given; vectors of zeros remove what is at their place.
        replace: whether nothing else stays.

    """
    if replace:
        return change
    return SteeringTiers(
        _tier(old.base, change.base),
        _tier(old.prefill, change.prefill),
        _tier(old.decode, change.decode),
    )


def _tier(
    before: PackedVectors | None, given: PackedVectors | None
) -> PackedVectors | None:
    if given is None:
        return before
    if before is None:
        return pack(given.unpack(), given.operations)
    touched = {*given.taps, *(one.tap for one in given.operations)}
    kept = {tap: v for tap, v in before.unpack().items() if tap not in touched}
    done = [one for one in before.operations if one.tap not in touched]
    return pack({**kept, **given.unpack()}, [*done, *given.operations])
