# SPDX-License-Identifier: Apache-2.0
"""Changes of steering that a consumer makes while the engine runs.

`on_step` returns them; other threads of the worker's process submit them to the queue.
They are applied between two steps.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from vllm.logger import init_logger

logger = init_logger(__name__)

VectorsByHook: TypeAlias = Mapping[str, Mapping[int, Any]]
"""`{hook: {layer: vector [hidden_size]}}`."""


@dataclass(frozen=True, slots=True)
class SteeringVectorUpdate:
    """Add vectors at generated tokens of all requests; zeros remove one."""

    vectors: VectorsByHook
    phase: str = "decode"
    source: str = ""


@dataclass(frozen=True, slots=True)
class RequestSteeringOverride:
    """Steer one request by other vectors at its generated tokens from now on."""

    req_id: str
    vectors: VectorsByHook | None
    """None goes back to what the request asked for."""
    compose_admitted: bool = False
    """Whether the vectors are added to what the request asked for."""
    clamps: Any = None
    """Refused: a request's own clamps are part of its steering."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class SteeringScaleUpdate:
    """Scale what `SteeringVectorUpdate` adds (`tier_gain`), or a request's override."""

    scale: float
    config_hash: Any = None
    dyn_id: Any = None
    req_id: str | None = None
    tier_gain: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class SteeringMonitorUpdate:
    """Set or move the gate of what consumers add: of one request, or for all.

    At each generated token it is `sigmoid(sharpness (x . probe - threshold))`, decided
    in the same forward pass. The probe must read where the vectors act, or before.
    """

    hook: str
    layer: int
    probe: Any
    """`[hidden_size]`; None removes the monitor."""
    threshold: float = 0.0
    sharpness: float = 1.0
    gate_rows: bool = False
    """Whether the gate for all also gates overrides without a gate of their own."""
    req_id: str | None = None
    """The request whose override it gates; None for what is added for all."""
    config_hash: Any = None
    dyn_id: Any = None
    source: str = ""


Action: TypeAlias = (
    SteeringVectorUpdate
    | RequestSteeringOverride
    | SteeringScaleUpdate
    | SteeringMonitorUpdate
)


class Acting(NamedTuple):
    """What consumers made act at generated tokens in a step, as digests."""

    everywhere: str
    """Empty if nothing acted for all requests."""
    of_request: Mapping[str, str]
    """By request: what acted instead of what it asked for."""

    def at(self, req_id: str) -> str:
        """A digest of what acted at a request's tokens; empty if nothing did."""
        return "+".join(filter(None, (self.everywhere, self.of_request.get(req_id))))


class SteeringActionQueue:
    """Actions that wait for the end of the step; may be used from any thread."""

    current: ClassVar["SteeringActionQueue | None"] = None

    def __init__(self, maxsize: int = 1024) -> None:
        """Start empty; `maxsize` actions may wait."""
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._waiting: deque[Action] = deque()
        self._counts = dict.fromkeys(("submitted", "dropped", "applied", "rejected"), 0)

    def submit(self, action: Action) -> bool:
        """Add an action; False, and counted as dropped, if the queue is full."""
        with self._lock:
            fits = len(self._waiting) < self._maxsize
            self._counts["submitted" if fits else "dropped"] += 1
            if fits:
                self._waiting.append(action)
            return fits

    def drain(self) -> list[Action]:
        """Remove and return all actions, in their order."""
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def count(self, outcome: str) -> None:
        """Count an action as `applied` or `rejected`."""
        with self._lock:
            self._counts[outcome] += 1

    @property
    def is_empty(self) -> bool:
        """Whether no action waits."""
        return not self._waiting

    def stats(self) -> dict[str, int]:
        """How many actions were submitted, dropped, applied and rejected."""
        with self._lock:
            return dict(self._counts)


def get_steering_action_queue() -> SteeringActionQueue | None:
    """The queue of this worker; None, with a warning, where nothing takes actions."""
    if SteeringActionQueue.current is None:
        logger.warning_once(
            "Consumers cannot steer in this process: start the engine with "
            "--enable-steering and, unless a consumer runs within the step, "
            "--max-dynamic-steering-configs"
        )
    return SteeringActionQueue.current


def install_steering_action_queue(queue: SteeringActionQueue | None) -> None:
    """Set the queue of this process, as a worker does when it starts."""
    SteeringActionQueue.current = queue
