# SPDX-License-Identifier: Apache-2.0
"""Vectors that consumers set while the engine runs: for all requests, or for one.

A monitor gates them, that of a request or the one for all. An override is a
configuration in a slot that the scheduler does not know of, behind those that it
assigns. All of it acts at generated tokens only.

The rank whose consumers decide takes the actions; all ranks apply the same ones, in the
same order, to the same state.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from vllm.v1.residual.plugin_errors import is_interrupt, message_of
from vllm.v1.residual.steering_actions import (
    Acting,
    Action,
    RequestSteeringOverride,
    SteeringActionQueue,
    SteeringMonitorUpdate,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
    VectorsByHook,
)
from vllm.v1.residual.tap import INNER_POINTS, Tap
from vllm.v1.steering.conditions import Condition, is_known_at
from vllm.v1.steering.plan import (
    NO_STEERING,
    Details,
    PackedVectors,
    SteeringTiers,
    Vector,
    operation,
    pack,
    total,
)
from vllm.v1.steering.worker.tables import SteeringTables

EVEN = 0.5
"""The gate of a monitor without slope: the sigmoid of 0."""


class Monitor(NamedTuple):
    """The gate `sigmoid(sharpness (x . probe - threshold))`."""

    condition: Condition
    gate_rows: bool
    """Whether it also gates the overrides that have no monitor of their own."""

    def check(self, taps: Iterable[Tap]) -> None:
        """Refuse to gate what acts before the probe reads.

        Raises:
            ValueError: a vector is at such a hook point.

        """
        for tap in taps:
            if not is_known_at(self.condition.tap, tap):
                layer, hook = self.condition.tap
                raise ValueError(
                    f"the monitor at {hook} of layer {layer} decides after the vector "
                    f"at {tap[1]} of layer {tap[0]}; place it at or before all vectors"
                )


def monitor_of(update: SteeringMonitorUpdate) -> Monitor | None:
    """The monitor that a checked update sets; None if it removes one."""
    if update.probe is None:
        return None
    condition = Condition(
        layer=update.layer,
        hook=update.hook,
        probe=update.probe.astype("<f4").tobytes(),
        bias=0.0,
        cosine=False,
        above=True,
        threshold=update.threshold,
        sharpness=update.sharpness,
        scope="token",
        name="",
    )
    return Monitor(condition, update.gate_rows)


def pack_gated(
    vectors: Mapping[Tap, Vector], monitor: Monitor | None
) -> PackedVectors | None:
    """Additions at each token, gated by a monitor; None if nothing is added."""
    if monitor is None:
        return pack(vectors)
    if monitor.condition.sharpness == 0:
        return pack({tap: np.float32(EVEN) * one for tap, one in vectors.items()})
    details = Details(when=monitor.condition)
    operations = [
        operation(tap, "add", vector, 1.0, (None, None), False, None, details)
        for tap, vector in sorted(vectors.items(), key=lambda item: item[0])
        if vector.any()
    ]
    return pack({}, operations)


class Tier(NamedTuple):
    """What acts at generated tokens of all requests."""

    vectors: Mapping[Tap, Vector] = {}
    gain: float = 1.0
    monitor: Monitor | None = None

    def packed(self) -> PackedVectors | None:
        """The vectors times the gain, gated; None if nothing acts."""
        scaled = {tap: self.gain * one for tap, one in self.vectors.items()}
        return pack_gated(scaled, self.monitor)


@dataclass(frozen=True, slots=True)
class Override:
    """What acts at generated tokens of one request, instead of what it asked for."""

    slot: int
    vectors: Mapping[Tap, Vector]
    scale: float = 1.0
    monitor: Monitor | None = None
    digest: str = ""
    """Of all of it, once it is in force."""


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
        self._overrides: dict[str, Override] = {}
        self.tier = Tier()
        """What acts for all requests."""
        self._named = self.tier, ""
        """A state of it, and its digest."""
        self.errors: list[str] = []
        """Why the last actions were rejected."""
        self._checksum = self._count = 0

    @property
    def acting(self) -> Acting | None:
        """What is in force now; None if nothing is."""
        if self._named[0] is not self.tier:
            packed = self.tier.packed()
            digest = "" if packed is None else SteeringTiers(decode=packed).digest
            self._named = self.tier, digest
        if not self._named[1] and not self._overrides:
            return None
        of_request = {req_id: one.digest for req_id, one in self._overrides.items()}
        return Acting(self._named[1], of_request)

    def forget(self, finished: Iterable[str]) -> None:
        """Free the slots of requests that have ended."""
        for req_id in finished:
            self._overrides.pop(req_id, None)
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
                data = msgspec.msgpack.encode(action, enc_hook=np.ndarray.tobytes)
                self._checksum = crc32(data, self._checksum)
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

    def status(self) -> dict[str, Any]:
        """As `GET /v1/steering/dynamic` tells it."""
        hooks: dict[str, list[int]] = {}
        for layer, hook in sorted(self.tier.vectors):
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
                "active": bool(self.tier.vectors),
                "gain": self.tier.gain,
                "hooks": hooks,
            },
            "monitor": _described(self.tier.monitor),
            "row_monitor": {
                req_id: _described(one.monitor)
                for req_id, one in self._overrides.items()
                if one.monitor is not None
            },
            "rejections": self.errors,
        }

    def _apply(self, action: Action) -> None:
        match action:
            case SteeringVectorUpdate():
                self._add(action)
            case RequestSteeringOverride():
                self._override(action)
            case SteeringMonitorUpdate():
                self._watch(action)
            case SteeringScaleUpdate(scale=scale, req_id=str() as req_id):
                self._set(req_id, replace(self._overrides[req_id], scale=scale))
            case SteeringScaleUpdate(scale=scale):
                self.tier = self.tier._replace(gain=scale)

    def _add(self, action: SteeringVectorUpdate) -> None:
        if action.phase != "decode":
            raise ValueError("only phase='decode' can change while running")
        vectors = {**self.tier.vectors, **self._checked(action.vectors)}
        vectors = {tap: vector for tap, vector in vectors.items() if vector.any()}
        if self.tier.monitor is not None:
            self.tier.monitor.check(vectors)
        self.tier = self.tier._replace(vectors=vectors)

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
        slot = self.of_request.get(action.req_id)
        if slot is None and not self._free:
            raise ValueError(
                f"all {len(self._slots)} overrides are in use; start the server "
                "with more --max-dynamic-steering-configs"
            )
        known = self._overrides.get(action.req_id)
        monitor = None if known is None else known.monitor
        slot = self._free[0] if slot is None else slot
        self._set(action.req_id, Override(slot, vectors, monitor=monitor))

    def _watch(self, action: SteeringMonitorUpdate) -> None:
        """Set, move or remove the monitor of a request's override, or that for all."""
        if action.probe is not None:
            self._checked({action.hook: {action.layer: action.probe}})
        monitor = monitor_of(action)
        if action.req_id is not None:
            if action.req_id not in self._overrides:
                raise ValueError(f"request {action.req_id!r} has no override to gate")
            self._set(
                action.req_id, replace(self._overrides[action.req_id], monitor=monitor)
            )
            return
        tier = self.tier._replace(monitor=monitor)
        if monitor is not None:
            monitor.check(tier.vectors)
            for override in self._gated(monitor).values():
                monitor.check(override.vectors)
        changed = self._gated(self.tier.monitor) | self._gated(monitor)
        self.tier = tier
        for req_id, override in changed.items():
            self._set(req_id, override)

    def _gated(self, monitor: Monitor | None) -> dict[str, Override]:
        """The overrides that a monitor for all gates."""
        if monitor is None or not monitor.gate_rows:
            return {}
        return {r: one for r, one in self._overrides.items() if one.monitor is None}

    def _set(self, req_id: str, override: Override) -> None:
        """Put an override in force; nothing changes if it is refused."""
        monitor, shared = override.monitor, self.tier.monitor
        if monitor is None and shared is not None and shared.gate_rows:
            monitor = shared
        if monitor is not None:
            monitor.check(override.vectors)
        scaled = {tap: override.scale * one for tap, one in override.vectors.items()}
        packed = pack_gated(scaled, monitor)
        tiers = NO_STEERING if packed is None else SteeringTiers(decode=packed)
        self._tables.load(override.slot, tiers)
        if req_id not in self.of_request:
            self._free.remove(override.slot)
            self.of_request[req_id] = override.slot
        self._overrides[req_id] = replace(override, digest=tiers.digest)

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
        case SteeringMonitorUpdate(config_hash=None, dyn_id=None):
            return _plain_monitor(action)
        case SteeringScaleUpdate(tier_gain=True):
            return SteeringScaleUpdate(_finite(action.scale), tier_gain=True)
        case SteeringScaleUpdate(req_id=str() as req_id):
            return SteeringScaleUpdate(_finite(action.scale), req_id=req_id)
    raise ValueError("it is not supported: name a request, or act for all of them")


def _plain_monitor(action: SteeringMonitorUpdate) -> SteeringMonitorUpdate:
    sharpness = _finite(action.sharpness)
    if sharpness < 0:
        raise ValueError("sharpness must not be negative")
    probe = action.probe
    return SteeringMonitorUpdate(
        str(action.hook),
        int(action.layer),
        None if probe is None else np.array(probe, dtype=np.float32),
        _finite(action.threshold),
        sharpness,
        bool(action.gate_rows),
        None if action.req_id is None else str(action.req_id),
        source=str(action.source),
    )


def _described(monitor: Monitor | None) -> dict[str, Any] | None:
    if monitor is None:
        return None
    return {**monitor.condition.as_dict(), "gate_rows": monitor.gate_rows}


def _arrays(raw: VectorsByHook) -> VectorsByHook:
    return {
        str(hook): {
            int(layer): np.array(given, dtype=np.float32)
            for layer, given in layers.items()
        }
        for hook, layers in raw.items()
    }


def _finite(value: float) -> float:
    if not np.isfinite(value):
        raise ValueError("scale, threshold and sharpness must be finite")
    return float(value)
