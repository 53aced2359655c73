# SPDX-License-Identifier: Apache-2.0
"""Steering in the scheduler: who gets a slot, who waits, who gives one back."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.steering.core.name_log import NamesLog
from vllm.v1.steering.core.prefix_cache import (
    EngineSteering,
    check_external_caches,
    continue_session,
    forget,
)
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, tiers_of, with_tiers
from vllm.v1.steering.slots import Slots, SlotUse, SteeringStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request


class HeldChange(NamedTuple):
    """What the global vectors are to become, and what they go back to otherwise."""

    holder: str
    """Names the change; no other is made meanwhile."""
    old: SteeringTiers
    new: SteeringTiers


class SteeringScheduling:
    """Bounds the configurations in use, and tells the workers of changes.

    Steered requests are served in the order of the queue: once one waits for a
    slot, those behind it wait too, even where their configuration is loaded.
    Otherwise they could keep it loaded for ever. Unsteered requests pass.
    """

    def __init__(self, num_slots: int, bank_bytes: int | None = None) -> None:
        """Steer nothing.

        Args:
            num_slots: how many configurations a batch may hold.
            bank_bytes: what their operations' vectors may take; None for any number.

        """
        self.slots = Slots(num_slots, bank_bytes)
        self.tiers = NO_STEERING
        """The global vectors."""
        self.held: HeldChange | None = None
        """A change of them that several engines are about to make together."""
        self.names = NamesLog()
        self.saes: dict[str, str] = {}
        """The fingerprints of the SAEs that the workers have, by name."""
        self._step = SteeringStep()
        self._blocked = False

    @property
    def possible(self) -> tuple[SteeringTiers, ...]:
        """Each set of global vectors that a request must be able to run with."""
        if self.held is None:
            return (self.tiers,)
        return self.held.old, self.held.new

    @property
    def _taken(self) -> int:
        """Bytes of vectors that act for all requests."""
        return max(one.bank_bytes for one in self.possible)

    def new_step(self) -> None:
        """A step is about to be scheduled."""
        self._blocked = False

    def admits(self, request: "Request") -> bool:
        """Whether a waiting request may be scheduled, as far as slots go."""
        tiers = tiers_of(request)
        if tiers is None:
            return True
        if not self._blocked:
            size, taken = tiers.bank_bytes, self._taken
            self._blocked = not self.slots.has_room(tiers.digest, size, taken)
        return not self._blocked

    def begin(self, request: "Request") -> None:
        """A waiting request is scheduled: it runs from this step on."""
        tiers = tiers_of(request)
        if tiers is None:
            return
        digest, size = tiers.digest, tiers.bank_bytes
        for emptied in self.slots.make_room(digest, size, self._taken):
            self._step.loads.append((emptied, NO_STEERING))
        slot, is_new = self.slots.acquire(request.request_id, digest, size)
        if is_new:
            self._step.loads.append((slot, tiers))
        self._step.uses[request.request_id] = SlotUse(slot, request.num_prompt_tokens)

    def release(self, request: "Request") -> None:
        """A request has finished or is aborted."""
        if tiers_of(request) is not None:
            self.slots.release(request.request_id)

    def preempted(self, request: "Request") -> None:
        """A request goes back to the queue; it will need a slot again."""
        self.release(request)
        forget(request)

    def continued(self, request: "Request") -> None:
        """A request whose prompt comes in parts is given the next one."""
        continue_session(request)

    def take_step(self) -> SteeringStep | None:
        """What to send with this step, None where there is nothing."""
        step, self._step = self._step, SteeringStep()
        return step if step.uses else None


def take_vectors_off(requests: Iterable["NewRequestData"]) -> None:
    """What workers hear of requests names no vectors: they may be megabytes."""
    for request in requests:
        params = request.sampling_params
        if params is not None and params._steering is not None:
            request.sampling_params = with_tiers(params, None)


def steering_scheduling(vllm_config: "VllmConfig") -> SteeringScheduling:
    """The scheduler's part of steering for a configuration."""
    check_external_caches(vllm_config)
    EngineSteering.set(NO_STEERING)
    config = vllm_config.steering_config
    return SteeringScheduling(config.max_configs, config.bank_bytes)
