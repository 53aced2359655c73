# SPDX-License-Identifier: Apache-2.0
"""What a step tells every worker about steering."""

from dataclasses import dataclass, field

from vllm.v1.steering.plan import SteeringTiers


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A request that is scheduled for the first time, or again after preemption."""

    slot: int
    """The slot of its configuration, whose rows steer its tokens."""
    num_prompt_tokens: int


@dataclass(slots=True)
class SteeringStep:
    """Decided by the scheduler alone, so that all ranks do the same."""

    loads: list[tuple[int, SteeringTiers]] = field(default_factory=list)
    """Slots that get another configuration, before the step runs."""
    uses: dict[str, SlotUse] = field(default_factory=dict)
    """Steered requests by id."""
