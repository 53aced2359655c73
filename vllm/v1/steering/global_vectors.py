# SPDX-License-Identifier: Apache-2.0
"""The global vectors: what a change makes of them, and what a front end knows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.plan import NO_STEERING, PackedVectors, SteeringTiers, pack


class SharedVectors:
    """Which global vectors may hold when a request arrives in the engine.

    One set, unless a change is under way or its outcome is unknown. A front end
    knows of its own changes only: where there are others, it knows nothing, and
    leaves the check to the engine core.
    """

    def __init__(self) -> None:
        self.possible: tuple[SteeringTiers, ...] = (NO_STEERING,)

    def unknown(self) -> None:
        """Others change them too."""
        self.possible = ()

    @contextmanager
    def changing(self, change: SteeringTiers, replace: bool) -> Iterator[None]:
        """Within, both what was and what will be may hold.

        Behind it the change holds, or if it was refused what was before.
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
