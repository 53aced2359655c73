# SPDX-License-Identifier: Apache-2.0
"""The global vectors as a front end knows them, to check requests against."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.merging import merged
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers


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
