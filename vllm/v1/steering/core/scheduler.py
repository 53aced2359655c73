# SPDX-License-Identifier: Apache-2.0
"""Steering in the scheduler: slots are assigned, waited for and released."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger
from vllm.v1.residual.receipts import WAITING, Fired, FiredLabel
from vllm.v1.residual.steering_actions import Action
from vllm.v1.steering.core.name_log import NamesLog
from vllm.v1.steering.core.prefix_cache import (
    EngineSteering,
    check_external_caches,
    forget,
)
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, tiers_of, with_tiers
from vllm.v1.steering.slots import Slots, SteeringStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request

logger = init_logger(__name__)

LEAST_LOADS = 8
"""How many configurations a step may load however few slots there are."""
SAID_EVERY = 60.0
"""Seconds between two log lines about requests that wait."""


class HeldChange(NamedTuple):
    """A prepared change of the global vectors, and the state to restore on failure."""

    holder: str
    """Identifies the change; no other change is made until its release."""
    old: SteeringTiers
    new: SteeringTiers


class SteeringScheduling:
    """Limits the configurations in use, and sends changes of slots to the workers.

    Steered requests are served in the order of the queue: when one waits for a slot,
    later steered requests wait too, even if their configuration is loaded. Otherwise
    they could keep it loaded forever. Unsteered requests are not delayed.
    """

    def __init__(
        self,
        num_slots: int,
        bank_bytes: int | None = None,
        most_loads: int | None = None,
    ) -> None:
        """Start without any configuration.

        Args:
            num_slots: how many configurations a batch may hold.
            bank_bytes: most bytes of operations' vectors; None for no limit.
            most_loads: most configurations that one step loads; None for no limit.

        """
        self._most_loads = most_loads
        self.slots = Slots(num_slots, bank_bytes)
        self.tiers = NO_STEERING
        """The global vectors in force."""
        self.held: HeldChange | None = None
        """A change of the global vectors that several engines prepare together."""
        self.names: dict[str, NamesLog] = defaultdict(NamesLog)
        """The logs of names, by kind of module."""
        self.saes: dict[str, str] = {}
        """By name, the fingerprints of the SAEs that the workers hold."""
        self.fired: dict[FiredLabel, int] = {}
        """By condition, the number of tokens at which it has fired."""
        self._unsent: Counter[FiredLabel] = Counter()
        self._step = SteeringStep()
        self._blocked = False
        self._said_at = -SAID_EVERY

    def note_fired(self, grown: Fired | None) -> None:
        """Add what a step's output says about conditions."""
        for probe, layer, hook, count in grown or ():
            key = probe, layer, hook
            self._unsent[key] += count
            self.fired[key] = self.fired.get(key, 0) + count

    def take_fired(self) -> Fired:
        """What was added since the last call, for the metrics."""
        found = [(*label, count) for label, count in self._unsent.items()]
        self._unsent.clear()
        return found

    def note_actions(self, actions: Iterable[Action] | None) -> None:
        """Send to all ranks, with the next step, what a step's consumers want."""
        self._step.actions += actions or ()

    @property
    def changes_all(self) -> bool:
        """Whether any request's stream may be changed without its asking."""
        return bool(self.tiers) or EngineSteering.dynamic

    @property
    def possible(self) -> tuple[SteeringTiers, ...]:
        """The sets of global vectors that every request must fit."""
        if self.held is None:
            return (self.tiers,)
        return self.held.old, self.held.new

    def change(self, tiers: SteeringTiers, held: HeldChange | None) -> None:
        """Set the global vectors, and the change of them that is being prepared."""
        self.tiers, self.held = tiers, held
        self.slots.taken = max(one.bank_bytes for one in self.possible)

    def new_step(self) -> None:
        """Begin the scheduling of a step."""
        self._blocked = False

    def admits(self, request: "Request") -> bool:
        """Whether a slot is available for a waiting request, if it needs one."""
        tiers = tiers_of(request)
        if tiers is None:
            return True
        if self._most_loads is not None and not self._blocked:
            self._blocked = len(self._step.loads) >= self._most_loads
        if not self._blocked:
            self._blocked = not self.slots.has_room(tiers.digest, tiers.bank_bytes)
            if self._blocked:
                self._unsent[WAITING] += 1
                self._say_blocked()
        return not self._blocked

    def _say_blocked(self) -> None:
        """Log, at most once a minute, that requests wait for a configuration's end."""
        now = monotonic()
        if now - self._said_at < SAID_EVERY:
            return
        self._said_at = now
        logger.warning(
            "Requests wait, because more steering configurations are wanted at once "
            "than --max-steering-configs, or more vectors of operations than "
            "--steering-bank-mib holds"
        )

    def begin(self, request: "Request") -> None:
        """Assign a slot to a request that is scheduled from this step on."""
        tiers = tiers_of(request)
        if tiers is None:
            return
        digest, size = tiers.digest, tiers.bank_bytes
        for emptied in self.slots.make_room(digest, size):
            self._step.loads.append((emptied, NO_STEERING))
        slot, is_new = self.slots.acquire(request.request_id, digest, size)
        if is_new:
            self._step.loads.append((slot, tiers))
        self._step.uses[request.request_id] = slot

    def release(self, request: "Request") -> None:
        """Release the slot of a request that has finished or was aborted."""
        if tiers_of(request) is not None:
            self.slots.release(request.request_id)

    def preempted(self, request: "Request") -> None:
        """Release the slot of a preempted request, which needs one again later."""
        self.release(request)
        forget(request)

    def take_step(self) -> SteeringStep | None:
        """The changes to send to the workers with this step; None if there are none."""
        step, self._step = self._step, SteeringStep()
        return step if step.uses or step.actions else None


def take_vectors_off(requests: Iterable["NewRequestData"]) -> None:
    """Remove the vectors, which may be megabytes, from the requests sent to workers."""
    for request in requests:
        params = request.sampling_params
        if params is not None and params._steering is not None:
            request.sampling_params = with_tiers(params, None)


def steering_scheduling(vllm_config: "VllmConfig") -> SteeringScheduling:
    """Create the scheduler's steering state."""
    check_external_caches(vllm_config)
    dynamic = vllm_config.capture_config.takes_actions
    EngineSteering.begin(dynamic, dynamic and vllm_config.kv_transfer_config is None)
    config = vllm_config.steering_config
    # Steps that are in flight at the same time share the slots. Otherwise one takes
    # all, and the next cannot be prepared before it has ended.
    share = -(-config.max_configs // vllm_config.max_concurrent_batches)
    scheduling = SteeringScheduling(
        config.max_configs, config.bank_bytes, max(share, LEAST_LOADS)
    )
    scheduling.saes |= {
        name: info["fingerprint"]
        for name, info in vllm_config.readout_config.described.items()
        if info["kind"] == "sae"
    }
    return scheduling
