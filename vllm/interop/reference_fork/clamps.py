# SPDX-License-Identifier: Apache-2.0
"""Clamps in fields of their own become entries whose operation is `clamp`.

`{hook: {layer: [{"vector", "min"?, "max"?, "value"?, "strength"?}, ...]}}`, or for a
hook the packed form `{"dtype", "shape", "layer_indices", "data", "bounds",
"strengths"?}`: a row, a pair of bounds (None: no bound) and a strength for each clamp;
layers may repeat.
"""

from collections.abc import Mapping
from typing import Any

from vllm.interop.reference_fork.objects import object_of
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.packed import unpack_array
from vllm.v1.steering.spec.parse import Parsed

PACKED_KEYS = ("dtype", "shape", "layer_indices", "data", "bounds", "strengths")
MAX_CLAMPS = 4096
"""Most clamps in one packed form."""


def as_entries(raw: Any, where: str) -> Any:
    """Convert clamps to entries.

    Args:
        raw: as the user wrote it; what is parsed already is returned as it is.
        where: the parameter's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    if isinstance(raw, Parsed):
        return raw
    if not isinstance(raw, Mapping) or not raw:
        raise fail(
            f"{where} must map at least one hook point to clamps by layer, for example "
            '{"post_block": {"3": [{"vector": [...], "min": 0}]}}; omit it for no '
            "clamps",
            where,
            raw,
        )
    return {hook: _of_hook(given, f"{where}.{hook}") for hook, given in raw.items()}


def _of_hook(given: Any, at: str) -> Any:
    if isinstance(given, Mapping) and "data" in given and "layer_indices" in given:
        return _unpacked(given, at)
    if isinstance(given, Mapping) and "vector" not in given:
        return {
            layer: _clamps(these, f"{at}.{layer}") for layer, these in given.items()
        }
    return _clamps(given, at)  # An address names the layer.


def _clamps(given: Any, at: str) -> list[dict[str, Any]]:
    listed = given if isinstance(given, (list, tuple)) else [given]
    if not listed:
        raise fail(f"{at}: give at least one clamp, or leave it out", at, given)
    for one in listed:
        if not isinstance(one, Mapping):
            raise fail(
                f'{at}: a clamp is an object such as {{"vector": [...], "min": a, '
                f'"max": b}}, not {shown(one)}',
                at,
                one,
            )
        if one.get("op", "clamp") != "clamp":
            raise fail(
                f"{at}.op: only clamps are allowed; put other operations among the "
                "vectors",
                f"{at}.op",
                one["op"],
            )
    return [{**one, "op": "clamp"} for one in listed]


def _unpacked(packed: Mapping[str, Any], at: str) -> dict[Any, list[dict[str, Any]]]:
    object_of(packed, at, PACKED_KEYS[:-1], PACKED_KEYS[-1:])
    layers, bounds = as_list(packed["layer_indices"]), as_list(packed["bounds"])
    rows = unpack_array(packed, at, dimensions=(2,))
    strengths = as_list(packed.get("strengths"))
    strengths = [1.0] * len(rows) if strengths is None else strengths
    for name, given in (
        ("layer_indices", layers),
        ("bounds", bounds),
        ("strengths", strengths),
    ):
        if not isinstance(given, (list, tuple)) or len(given) != len(rows):
            raise fail(
                f"{at}.{name} must have one entry for each of the {len(rows)} rows",
                f"{at}.{name}",
                given,
            )
    if len(rows) > MAX_CLAMPS:
        raise fail(f"{at}: at most {MAX_CLAMPS} clamps", at, len(rows))
    found: dict[Any, list[dict[str, Any]]] = {}
    for layer, row, given, strength in zip(
        layers, rows, bounds, strengths, strict=True
    ):
        pair = as_list(given)
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise fail(
                f"{at}.bounds: each pair must be [min, max], of which one may be null",
                f"{at}.bounds",
                pair,
            )
        if not isinstance(layer, str) and not is_integer(layer):
            raise fail(f"{at}.layer_indices must be 0-based indices", at, layer)
        clamp = {"vector": row, "min": pair[0], "max": pair[1], "strength": strength}
        found.setdefault(str(layer), []).append({**clamp, "op": "clamp"})
    return found
