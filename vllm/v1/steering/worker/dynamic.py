# SPDX-License-Identifier: Apache-2.0
"""Vectors that consumers set while the engine runs: for all requests, or for one.

An override is a configuration in a slot that the scheduler does not know of, behind
those that it assigns. All of it acts at generated tokens only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vllm.v1.residual.steering_actions import (
    Action,
    RequestSteeringOverride,
    SteeringActionQueue,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
    VectorsByHook,
)
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, Tap, Vector, pack, total
from vllm.v1.steering.worker.tables import SteeringTables


class DynamicSteering:
    """Overrides of requests, and the vectors for all. Engine thread only."""

    def __init__(
        self,
        tables: SteeringTables,
        taps: Iterable[Tap],
        width: int,
        slots: range,
        admitted: Callable[[str], SteeringTiers],
    ) -> None:
        """Start without any.

        Args:
            tables: of the worker.
            taps: that can be steered.
            width: of a vector.
            slots: for overrides.
            admitted: returns what a running request asked for; raises `KeyError` if
                there is none of this id.

        """
        self.queue = SteeringActionQueue()
        self._tables = tables
        self._taps = frozenset(taps)
        self._width = width
        self._slots = slots
        self._admitted = admitted
        self._free = list(slots)
        self.of_request: dict[str, int] = {}
        """The slot of each request with an override."""
        self._vectors: dict[str, dict[Tap, Vector]] = {}
        self._for_all: dict[Tap, Vector] = {}
        self._gain = 1.0
        self.errors: list[str] = []
        """Why the last actions were rejected."""

    def forget(self, finished: Iterable[str]) -> None:
        """Free the slots of requests that have ended."""
        for req_id in finished:
            self._vectors.pop(req_id, None)
            slot = self.of_request.pop(req_id, None)
            if slot is not None:
                self._free.append(slot)

    def apply(self, actions: Iterable[Action]) -> bool:
        """Carry actions out, in their order; whether any has changed something."""
        changed = False
        for action in actions:
            try:
                self._apply(action)
            except Exception as error:  # An action may hold anything.
                self.queue.count("rejected")
                self.errors = [*self.errors[-7:], f"{type(action).__name__}: {error}"]
            else:
                self.queue.count("applied")
                changed = True
        return changed

    @property
    def for_all(self) -> dict[Tap, Vector]:
        """What is added for all requests at generated tokens."""
        return {tap: self._gain * one for tap, one in self._for_all.items()}

    def status(self) -> dict[str, Any]:
        """As `GET /v1/steering/dynamic` tells it."""
        hooks: dict[str, list[int]] = {}
        for layer, hook in sorted(self._for_all):
            hooks.setdefault(hook, []).append(layer)
        return {
            "action_queue": self.queue.stats(),
            "dynamic_pool": {
                "capacity": len(self._slots),
                "in_use": len(self._slots) - len(self._free),
                "overrides": sorted(self.of_request),
            },
            "dynamic_tier": {
                "active": bool(self._for_all),
                "gain": self._gain,
                "hooks": hooks,
            },
            "rejections": self.errors,
        }

    def _apply(self, action: Action) -> None:
        match action:
            case SteeringVectorUpdate():
                if action.phase != "decode":
                    raise ValueError("only phase='decode' can change while running")
                for tap, vector in self._checked(action.vectors).items():
                    self._for_all.pop(tap, None)
                    if vector.any():
                        self._for_all[tap] = vector
            case RequestSteeringOverride():
                self._override(action)
            case SteeringScaleUpdate(tier_gain=True):
                self._gain = _finite(action.scale)
            case SteeringScaleUpdate(req_id=str() as req_id):
                scale, own = _finite(action.scale), self._vectors[req_id]
                self._load(req_id, {tap: scale * one for tap, one in own.items()})
            case _:
                raise ValueError(
                    "it is not supported; a gate is an entry with `when`, or a gate "
                    "in the request's field `steering`"
                )

    def _override(self, action: RequestSteeringOverride) -> None:
        if action.clamps is not None:
            raise ValueError("clamps cannot be overridden")
        own = self._admitted(action.req_id)
        if action.vectors is None:
            self.forget([action.req_id])
            return
        vectors = self._checked(action.vectors)
        if action.compose_admitted:
            admitted = total([own.base, own.decode])
            for tap, one in admitted.items():
                vectors[tap] = vectors[tap] + one if tap in vectors else one
        if action.req_id not in self.of_request:
            if not self._free:
                raise ValueError(
                    f"all {len(self._slots)} overrides are in use; start the server "
                    "with more --max-dynamic-steering-configs"
                )
            self.of_request[action.req_id] = self._free.pop(0)
        self._vectors[action.req_id] = vectors
        self._load(action.req_id, vectors)

    def _load(self, req_id: str, vectors: Mapping[Tap, Vector]) -> None:
        packed = pack(vectors)
        tiers = NO_STEERING if packed is None else SteeringTiers(decode=packed)
        self._tables.load(self.of_request[req_id], tiers)

    def _checked(self, raw: VectorsByHook) -> dict[Tap, Vector]:
        found = {}
        for hook, layers in raw.items():
            for layer, given in layers.items():
                vector = np.asarray(given, dtype=np.float32)
                tap = int(layer), hook
                if tap not in self._taps:
                    raise ValueError(f"no hook point {hook} in layer {layer}")
                if vector.shape != (self._width,) or not np.isfinite(vector).all():
                    raise ValueError(f"vectors must be {self._width} finite numbers")
                found[tap] = vector
        return found


def _finite(scale: float) -> float:
    if not np.isfinite(scale):
        raise ValueError("scale must be finite")
    return float(scale)
