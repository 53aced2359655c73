# SPDX-License-Identifier: Apache-2.0
"""The global vectors: how changes merge, and which states a front end must expect."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.plan import NO_STEERING, PackedVectors, SteeringTiers, pack


class SharedVectors:
    """The global vectors that may be in force when a request reaches the engine core.

    There is one possible set, unless a change is in progress or its outcome is unknown.
    A front end knows its own changes only: where other front ends exist, it knows no
    set, and leaves the check to the engine core.
    """

    def __init__(self, alone: bool = True) -> None:
        """Start without vectors; `alone`: no other front end changes them."""
        self.possible: tuple[SteeringTiers, ...] = (NO_STEERING,) if alone else ()

    @contextmanager
    def changing(self, change: SteeringTiers, replace: bool) -> Iterator[None]:
        """Cover the time of a change, in which both the old and the new set may hold.

        Afterwards the new set holds, or the old one if the change was refused.
        """
        before = self.possible
        after = _distinct(merged(old, change, replace) for old in before)
        self.possible = _distinct([*before, *after])
        try:
            yield
        except (SteeringChangeError, SteeringValidationError):
            self.possible = before
            raise
        self.possible = after


def _distinct(tiers: Iterable[SteeringTiers]) -> tuple[SteeringTiers, ...]:
    return tuple({one.digest: one for one in tiers}.values())


def merged(old: SteeringTiers, change: SteeringTiers, replace: bool) -> SteeringTiers:
    """The global vectors after a change, which replaces what is set at the same taps.

    Args:
        old: the global vectors before.
        change: the new vectors; vectors of zeros remove what is at their tap.
        replace: whether all old vectors are dropped.

    """
    if replace:
        return change
    return old.joined(change, _tier)


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
