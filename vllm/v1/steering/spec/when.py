# SPDX-License-Identifier: Apache-2.0
"""Parses `when` of an entry to a condition."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer, layer_index
from vllm.v1.residual.tap import Tap, resolve_tap, why_not, width_at
from vllm.v1.steering.conditions import SCOPES, Condition, Scope, is_known_at
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.table import (
    REQUIRED,
    Key,
    Table,
    Values,
    as_written,
    flag,
    number,
    one_of,
    parse_vector,
    read,
)

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel

KEYS: Table = {
    "probe": Key(as_written, REQUIRED),
    "index": Key(as_written),
    "bias": Key(number),
    "cosine": Key(flag),
    "layer": Key(as_written),
    "hook": Key(as_written),
    "above": Key(number),
    "below": Key(number),
    "sharpness": Key(number),
    "scope": Key(one_of(SCOPES)),
    "reduce": Key(one_of(("last", "mean"))),
}
FORM = (
    'it is {"probe": a vector or the name of one, "layer", "hook", "above" or "below": '
    'a number, "bias"?, "cosine"?, "sharpness"?, "scope"?, "reduce"?, "index"?}'
)


class _Probe(NamedTuple):
    """The parsed probe: the condition compares `x . vector + bias`, or the cosine."""

    vector: Vector
    bias: float
    cosine: bool
    activation: str
    tap: Tap
    """Where it reads."""
    name: str


def parse_when(raw: Any, entry: Tap, model: "SteeredModel", at: str) -> Condition:
    """Parse the condition of an entry.

    Args:
        raw: the value that the user wrote.
        entry: where the entry acts.
        model: the model that the probe must fit.
        at: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if not isinstance(raw, Mapping) or "probe" not in raw:
        raise fail(f"{at}: {FORM}", at, raw)
    if unknown := sorted(str(key) for key in raw if key not in KEYS):
        raise fail(f"{at}: unknown key {shown(unknown[0])}; {FORM}", at, unknown[0])
    values = read(raw, KEYS, model, at)
    probe = _probe(values, model, at)
    tap = probe.tap
    check_known(tap, entry, at)
    model.placement.check(tap, at)
    above, threshold = _threshold(values, probe, at)
    scope = _scope(values, model, at)
    if values["reduce"] is not None and scope != "prompt":
        raise fail(
            f'{at}.reduce: a reduction over the prompt needs "scope": "prompt"; with '
            f'"{scope}" each token decides',
            f"{at}.reduce",
            values["reduce"],
        )
    return Condition(
        *tap,
        probe.vector.astype("<f4").tobytes(),
        probe.bias,
        probe.cosine,
        above,
        threshold,
        values["sharpness"] or 0.0,
        scope,
        probe.name,
        values["reduce"] == "mean",
    )


def check_known(probe: Tap, entry: Tap, at: str) -> None:
    """Refuse a condition that is decided after the entry acts.

    Args:
        probe: where its probe reads.
        entry: where the entry acts.
        at: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if not is_known_at(probe, entry):
        raise fail(
            f"{at}: the probe reads {probe[1]} of layer {probe[0]}, which is not known "
            f"when the entry acts, at {entry[1]} of layer {entry[0]}; read at the same "
            "hook point, at one that every model computes before it, such as pre_attn "
            "of the same layer, or in an earlier layer",
            at,
            {"layer": probe[0], "hook": probe[1]},
        )


def _probe(values: Values, model: "SteeredModel", at: str) -> _Probe:
    probe = values["probe"]
    if isinstance(probe, str):
        return _named(probe, values, model, at)
    if values["index"] is not None:
        raise fail(
            f"{at}.index selects a row of a named probe; omit it for a vector",
            f"{at}.index",
            values["index"],
        )
    tap = _tap(values, None, "", model, at)
    read = replace(model, hidden_size=width_at(model.shapes, model.hidden_size, tap))
    vector = parse_vector(probe, read, f"{at}.probe")
    bias, cosine = values["bias"] or 0.0, bool(values["cosine"])
    return _Probe(_unit(vector, cosine, at), bias, cosine, "none", tap, "")


def _named(name: str, values: Values, model: "SteeredModel", at: str) -> _Probe:
    for key in ("bias", "cosine"):
        if values[key] is not None:
            raise fail(
                f"{at}.{key}: the probe {shown(name)} has its own; leave it out",
                f"{at}.{key}",
                values[key],
            )
    found = model.named.probe(name, f"{at}.probe")
    rows = len(found.bias)
    index = 0 if rows == 1 and values["index"] is None else values["index"]
    if not is_integer(index, 0, rows):
        raise fail(
            f"{at}.index: the probe {shown(name)} has {rows} rows; give the one that "
            "decides, from 0",
            f"{at}.index",
            index,
        )
    if found.activation not in ("none", "relu", "sigmoid"):
        raise fail(
            f"{at}.probe: {shown(name)} ends in {found.activation}; a condition "
            "compares the value before it: register the probe without an activation",
            f"{at}.probe",
            name,
        )
    vector = np.ascontiguousarray(found.vectors[index], dtype=np.float32)
    label = name if rows == 1 else f"{name}[{index}]"
    tap = _tap(values, found.tap, label, model, at)
    width = width_at(model.shapes, model.hidden_size, tap)
    if vector.shape != (width,):
        raise fail(
            f"{at}.probe: {shown(name)} is for rows of width {len(vector)}, and those "
            f"of {tap[1]} have {width} numbers",
            f"{at}.probe",
            name,
        )
    return _Probe(
        _unit(vector, found.cosine, at),
        float(found.bias[index]),
        found.cosine,
        found.activation,
        tap,
        label,
    )


def _unit(vector: Vector, cosine: bool, at: str) -> Vector:
    if not vector.any():
        raise fail(
            f"{at}.probe: a vector of zeros has no direction", f"{at}.probe", 0.0
        )
    if not cosine:
        return vector
    wide = vector.astype(np.float64)
    return (wide / np.linalg.norm(wide)).astype(np.float32)


def _tap(
    values: Values, own: Tap | None, name: str, model: "SteeredModel", at: str
) -> Tap:
    """Where the probe reads; `own` is where the probe of that name says it does."""
    layer, hook = values["layer"], values["hook"]
    if layer is None and hook is None and own is not None:
        layer, hook = own
    index = layer_index(layer)
    tap = None
    if isinstance(hook, str) and (layer is None or index is not None):
        tap = resolve_tap(index, hook)  # It may be another library's name.
    if tap is None or tap[0] is None or tap[1] not in model.hook_points.get(tap[0], ()):
        layers = sorted(model.hook_points)
        known = model.hook_points.get(layers[-1] if index is None else index)
        raise fail(
            f"{at}: layer and hook must name where the probe reads: a layer from "
            f"{layers[0]} to {layers[-1]}, and one of its hook points, such as "
            f"{list(known or model.hook_points[layers[-1]])}"
            f"{why_not(tap[1], model.missing) if tap else ''}",
            at,
            {"layer": layer, "hook": hook},
        )
    layer, hook = tap[0], tap[1]
    if own is not None and own != (layer, hook):
        raise fail(
            f"{at}: the probe {shown(name)} was made for {own[1]} of layer {own[0]}; "
            "leave out layer and hook",
            at,
            {"layer": layer, "hook": hook},
        )
    return layer, hook


def _threshold(values: Values, probe: _Probe, at: str) -> tuple[bool, float]:
    """Whether the condition fires above the threshold, and the threshold."""
    both = {name: values[name] for name in ("above", "below")}
    if list(both.values()).count(None) != 1:
        raise fail(
            f"{at}: give the threshold as above or as below, and not both", at, both
        )
    ((name, value),) = ((n, v) for n, v in both.items() if v is not None)
    if probe.activation == "sigmoid":
        if not 0 < value < 1:
            raise fail(
                f"{at}.{name}: the probe {shown(probe.name)} ends in a sigmoid; its "
                "values lie between 0 and 1",
                f"{at}.{name}",
                value,
            )
        value = math.log(value / (1 - value))
    elif probe.activation == "relu" and value <= 0 and (value or name == "below"):
        raise fail(
            f"{at}.{name}: the probe {shown(probe.name)} ends in a ReLU; its values "
            "are 0 or more, so this threshold decides nothing",
            f"{at}.{name}",
            value,
        )
    return name == "above", value


def _scope(values: Values, model: "SteeredModel", at: str) -> Scope:
    scope: Scope = values["scope"] or SCOPES[0]
    sharpness = values["sharpness"]
    if sharpness is not None and sharpness <= 0:
        raise fail(
            f"{at}.sharpness must be above 0; omit it for a gate that is 0 or 1",
            f"{at}.sharpness",
            sharpness,
        )
    if scope == "rest" and sharpness is not None:
        raise fail(
            f"{at}.sharpness: with this scope the gate opens at the first token that "
            "fires, and is 0 or 1; omit sharpness",
            f"{at}.sharpness",
            sharpness,
        )
    if scope == "rest" and model.placement.drafts:
        raise fail(
            f"{at}.scope: this server drafts tokens, and one that is rejected later "
            'could open the gate; use the scope "token" or "prompt", or start it '
            "without speculative decoding",
            f"{at}.scope",
            scope,
        )
    return scope
