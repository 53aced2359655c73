# SPDX-License-Identifier: Apache-2.0
"""Vectors that consumers set while the engine runs: for all requests, or for one.

An override is a configuration in a slot that the scheduler does not know of, behind
those that it assigns. All of it acts at generated tokens only.

The rank whose consumers decide takes the actions; all ranks apply the same ones, in the
same order, to the same state.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from vllm.v1.residual.plugin_errors import is_interrupt, message_of
from vllm.v1.residual.steering_actions import (
    Action,
    RequestSteeringOverride,
    SteeringActionQueue,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
    VectorsByHook,
)
from vllm.v1.residual.tap import INNER_POINTS, Tap
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, Vector, pack, total
from vllm.v1.steering.worker.tables import SteeringTables


class DynamicSteering:
    """Overrides of requests, and the vectors for all. Engine thread only."""

    def __init__(
        self,
        tables: SteeringTables,
        has_tap: Callable[[int, str], bool],
        width: int,
        slots: range,
        admitted: Callable[[str], SteeringTiers],
    ) -> None:
        """Start without any.

        Args:
            tables: of the worker.
            has_tap: whether a layer has a hook point, in any pipeline stage.
            width: of a vector.
            slots: for overrides.
            admitted: returns what a running request asked for; raises `KeyError` if
                there is none of this id.

        """
        self.queue = SteeringActionQueue()
        self._tables = tables
        self._has_tap = has_tap
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
        self._checksum = self._count = 0

    def forget(self, finished: Iterable[str]) -> None:
        """Free the slots of requests that have ended."""
        for req_id in finished:
            self._vectors.pop(req_id, None)
            slot = self.of_request.pop(req_id, None)
            if slot is not None:
                self._free.append(slot)

    def taken(self) -> list[Action]:
        """Take the waiting actions, as plain copies that other processes can read.

        Those of which there is no such copy are rejected.
        """
        found = []
        for action in self.queue.drain():
            try:
                found.append(_plain(action))
            except BaseException as error:  # An action may hold anything.
                if is_interrupt(error):
                    raise
                self.reject(action, error)
        return found

    def apply(self, actions: Iterable[Action]) -> bool:
        """Carry actions out, in their order; whether any has changed something."""
        changed = False
        for action in actions:
            self._count += 1
            try:
                self._checksum = crc32(_bytes_of(action), self._checksum)
                self._apply(action)
            except Exception as error:
                self.reject(action, error)
            else:
                self.queue.count("applied")
                changed = True
        return changed

    def reject(self, action: object, error: BaseException) -> None:
        """Count an action that could not be carried out, and keep the reason."""
        self.queue.count("rejected")
        why = f"{type(action).__name__}: {message_of(error)}"
        self.errors = [*self.errors[-7:], why]

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
            "action_checksum": self._checksum,
            "action_count": self._count,
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
            case SteeringScaleUpdate(scale=scale, req_id=str() as req_id):
                own = self._vectors[req_id]
                self._load(req_id, {tap: scale * one for tap, one in own.items()})
            case SteeringScaleUpdate(scale=scale):
                self._gain = scale

    def _override(self, action: RequestSteeringOverride) -> None:
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
                if not self._has_tap(layer, hook):
                    raise ValueError(f"no hook point {hook!r} in layer {layer}")
                if hook in INNER_POINTS:
                    raise ValueError(f"{hook!r} is not a point of the stream")
                if given.shape != (self._width,) or not np.isfinite(given).all():
                    raise ValueError(f"vectors must be {self._width} finite numbers")
                found[layer, hook] = given
        return found


def _plain(action: Action) -> Action:
    """A copy of an action that shares nothing with its consumer.

    Raises:
        ValueError: it is not an action that is supported, or not of its form.

    """
    match action:
        case SteeringVectorUpdate():
            vectors = _arrays(action.vectors)
            return SteeringVectorUpdate(vectors, str(action.phase), str(action.source))
        case RequestSteeringOverride():
            if action.clamps is not None:
                raise ValueError("clamps cannot be overridden")
            return RequestSteeringOverride(
                str(action.req_id),
                None if action.vectors is None else _arrays(action.vectors),
                bool(action.compose_admitted),
                source=str(action.source),
            )
        case SteeringScaleUpdate(tier_gain=True):
            return SteeringScaleUpdate(_finite(action.scale), tier_gain=True)
        case SteeringScaleUpdate(req_id=str() as req_id):
            return SteeringScaleUpdate(_finite(action.scale), req_id=req_id)
    raise ValueError(
        "it is not supported; a gate is an entry with `when`, or a gate in the "
        "request's field `steering`"
    )


def _arrays(raw: VectorsByHook) -> VectorsByHook:
    return {
        str(hook): {
            int(layer): np.array(given, dtype=np.float32)
            for layer, given in layers.items()
        }
        for hook, layers in raw.items()
    }


def _bytes_of(action: Action) -> bytes:
    """What tells actions apart, for the checksum."""
    return msgspec.msgpack.encode(action, enc_hook=np.ndarray.tobytes)


def _finite(scale: float) -> float:
    if not np.isfinite(scale):
        raise ValueError("scale must be finite")
    return float(scale)
