# SPDX-License-Identifier: Apache-2.0
"""The request field `steering`, the form in which an earlier public fork writes gates.

`[{"when", "scope", "apply"}]`: each gate becomes entries of `decode_steering_vectors`,
with `when` where a probe decides. A vector is `{"kind": "name", "name": n}` or
`{"kind": "inline", "packed": {hook: packed vectors}}`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.interop.reference_fork.objects import object_of
from vllm.v1.residual.numbers import finite_number
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.parse import unpacked

FIELD = "steering"
MAX_GATES = 16
"""Maximum number of gates of a request."""
SCOPES = ("this_token", "next_step", "rest_of_request", "rest_of_conversation")

Layers = Mapping[str, Mapping[Any, Any]]
"""`{hook: {layer: entry}}`."""
Resolve = Callable[[str, Any, str], Layers]
"""`resolve(kind, name, where)`: the registered vectors of a name."""
Entries = dict[str, dict[str, list[dict[str, Any]]]]
"""As `decode_steering_vectors`."""


class Gate(NamedTuple):
    """One checked gate."""

    raw: dict[str, Any]
    where: str
    when: dict[str, Any] | None
    """As an entry's `when`; None if it always acts."""
    factor: float
    """What its vectors are multiplied by."""
    steer: Layers | None
    """None if it damps the request's own steering instead of adding."""

    def entries(self, own: Mapping[Tap, Vector]) -> Entries:
        """What it adds at generated tokens.

        Args:
            own: what the request adds there without its gates.

        """
        found: Entries = {}
        steer: Any = self.steer
        if steer is None:  # Damped to a factor: the rest is subtracted.
            steer = {}
            for (layer, hook), vector in own.items():
                steer.setdefault(hook, {})[layer] = vector
        for hook, layers in steer.items():
            for layer, one in layers.items():
                entry = dict(one) if isinstance(one, Mapping) else {"vector": one}
                entry["scale"] = entry.get("scale", 1.0) * self.factor
                if self.when is not None:
                    entry["when"] = self.when
                found.setdefault(hook, {}).setdefault(str(layer), []).append(entry)
        return found


def parse_gates(raw: Any, resolve: Resolve, where: str = FIELD) -> list[Gate]:
    """Parse the field `steering`.

    Args:
        raw: as the user wrote it.
        resolve: finds registered vectors.
        where: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if not isinstance(raw, (list, tuple)) or not 0 < len(raw) <= MAX_GATES:
        raise fail(f"{where} must list 1 to {MAX_GATES} gates", where, raw)
    return [_gate(one, resolve, f"{where}[{n}]") for n, one in enumerate(raw)]


def _gate(raw: Any, resolve: Resolve, where: str) -> Gate:
    gate = object_of(raw, where, ("when", "scope", "apply"))
    if gate["scope"] not in SCOPES:
        raise fail(
            f"{where}.scope must be one of {list(SCOPES)}",
            f"{where}.scope",
            gate["scope"],
        )
    when, weight = _when(gate["when"], gate["scope"], resolve, f"{where}.when")
    factor, steer = _apply(gate["apply"], resolve, f"{where}.apply")
    damps = steer is None
    kind = gate["when"]["kind"]
    if damps and kind == "probe" and gate["scope"] == "this_token":
        raise fail(
            f"{where}: a probe cannot attenuate its own token; use the scope "
            "rest_of_request",
            f"{where}.scope",
            gate["scope"],
        )
    if gate["scope"] == "rest_of_conversation":
        _check_stays(gate, f"{where}.scope")
    return Gate(gate, where, when, (factor - 1.0 if damps else factor) * weight, steer)


def _check_stays(gate: Mapping[str, Any], where: str) -> None:
    apply = gate["apply"]
    if apply["kind"] == "add" and apply["steer"].get("kind") == "inline":
        raise fail(
            f"{where}: what stays for a conversation must be registered; give the "
            "vector a name by POST /v1/steering/vectors/register",
            where,
            gate["scope"],
        )
    if gate["when"]["kind"] == "probe":
        raise fail(
            f"{where}: whether a probe has fired is known on the device alone; use "
            "rest_of_request, and read the probe as a readout to decide for the next "
            "request",
            where,
            gate["scope"],
        )


def _when(
    raw: Any, scope: str, resolve: Resolve, where: str
) -> tuple[dict[str, Any] | None, float]:
    """The condition of entries, and a factor of their strength."""
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    if kind == "always":
        object_of(raw, where, ("kind",))
        return None, 1.0
    if kind != "probe":
        raise fail(f'{where}.kind must be "always" or "probe"', f"{where}.kind", kind)
    when = object_of(raw, where, ("kind", "probe", "threshold"), ("sharpness",))
    threshold = finite_number(when["threshold"], f"{where}.threshold", fail)
    sharpness = finite_number(when.get("sharpness", 1.0), f"{where}.sharpness", fail)
    if sharpness < 0:
        raise fail(
            f"{where}.sharpness must not be negative", f"{where}.sharpness", sharpness
        )
    if scope == "next_step":
        raise fail(
            f"{where}: a probe decides for its own token (this_token) or for that and "
            "all later ones (rest_of_request), not for the next one alone",
            f"{where}.scope",
            scope,
        )
    layers = _vectors(when["probe"], "probe", resolve, f"{where}.probe")
    sites = [(hook, layer) for hook, at in layers.items() for layer in at]
    if len(sites) != 1:
        raise fail(
            f"{where}.probe must have one vector at one layer and hook point, not "
            f"{len(sites)}",
            f"{where}.probe",
            sites[:4],
        )
    ((hook, layer),) = sites
    if scope == "this_token" and sharpness == 0:  # The sigmoid of 0, at every token.
        return None, 0.5
    given = layers[hook][layer]
    entry = given if isinstance(given, Mapping) else {"vector": given}
    vector, scale = entry["vector"], entry.get("scale", 1.0)
    if scale != 1.0:
        vector = [scale * float(value) for value in vector]
    condition = {"probe": vector, "layer": int(layer), "hook": hook, "above": threshold}
    if scope == "this_token":
        return {**condition, "sharpness": sharpness, "scope": "token"}, 1.0
    return {**condition, "scope": "rest"}, 1.0


def _apply(raw: Any, resolve: Resolve, where: str) -> tuple[float, Layers | None]:
    """The strength, and the vectors to add; none if it attenuates."""
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    if kind == "attenuate":
        apply = object_of(raw, where, ("kind", "strength"))
        return finite_number(apply["strength"], f"{where}.strength", fail), None
    if kind != "add":
        raise fail(
            f'{where}.kind must be "add" or "attenuate"; clamps are entries of '
            "decode_steering_vectors, which may have `when`",
            f"{where}.kind",
            kind,
        )
    apply = object_of(raw, where, ("kind", "steer"), ("strength",))
    strength = finite_number(apply.get("strength", 1.0), f"{where}.strength", fail)
    return strength, _vectors(apply["steer"], "steer", resolve, f"{where}.steer")


def _vectors(raw: Any, use: str, resolve: Resolve, where: str) -> Layers:
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    if kind == "name":
        name = object_of(raw, where, ("kind", "name"))["name"]
        return resolve(use, name, f"{where}.name")
    if kind != "inline":
        raise fail(f'{where}.kind must be "name" or "inline"', f"{where}.kind", kind)
    packed = object_of(raw, where, ("kind", "packed"))["packed"]
    return unpacked_hooks(packed, f"{where}.packed")


def unpacked_hooks(packed: Any, where: str) -> Layers:
    """`{hook: packed vectors}` as `{hook: {layer: entry}}`.

    Raises:
        SteeringValidationError: it has another form.

    """
    if not isinstance(packed, Mapping) or not packed:
        raise fail(
            f"{where} must map hook points to packed vectors", where, type(packed)
        )
    found = {}
    for hook, layers in packed.items():
        at = f"{where}.{hook}"
        found[str(hook)] = unpacked(layers, at)
        given = layers.get("layer_indices", ())
        if len(given) > len(found[str(hook)]):
            raise fail(
                f"{at}.layer_indices: give one vector for each layer", at, list(given)
            )
    return found
