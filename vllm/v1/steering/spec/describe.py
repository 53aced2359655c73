# SPDX-License-Identifier: Apache-2.0
"""Descriptions of vectors for responses: places and norms."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.v1.residual.spans import describe_positions
from vllm.v1.steering.plan import (
    Operation,
    OpName,
    PackedVectors,
    SteeringTiers,
    Vector,
)
from vllm.v1.steering.spec.entry import Entry
from vllm.v1.steering.spec.parse import Parsed

FIELDS = {
    "base": "vectors",
    "prefill": "prefill_vectors",
    "decode": "decode_vectors",
}

OWN_FIELDS: dict[OpName, tuple[str, ...]] = {
    "clamp": ("strength",),
    "replace": ("alpha",),
    "rotate": ("degrees",),
    "low_rank": ("activation",),
}
"""Fields that the description of an operation has in addition to those of all."""


def describe(tiers: SteeringTiers) -> dict[str, Any]:
    """`{tier: {hook: {layer: {"norm": n}}}}`, with norms of the scaled vectors."""
    return {name: _norms(getattr(tiers, tier)) for tier, name in FIELDS.items()}


def describe_applied(parsed: Mapping[str, Parsed]) -> list[dict[str, Any]]:
    """The entries of a change, in their order, as they were parsed.

    Each has its tier, hook point, layer and operation; norms are those of the vectors
    as given, before scaling.
    """
    return [
        {
            "tier": FIELDS[tier],
            "hook": entry.tap[1],
            "layer": entry.tap[0],
            **_described(entry),
        }
        for tier, one in parsed.items()
        for entry in one.entries
    ]


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _norms(packed: PackedVectors | None) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (layer, hook), vector in (packed.unpack() if packed else {}).items():
        found.setdefault(hook, {})[str(layer)] = {"norm": _norm(vector)}
    for one in packed.operations if packed else ():
        at = found.setdefault(one.hook, {}).setdefault(str(one.layer), {})
        at.setdefault("operations", []).append(_described(one))
    return found


def _described(one: Entry | Operation) -> dict[str, Any]:
    """The operation and its parameters; the norm is that of the vector as given."""
    details = one.details
    described = {
        "op": one.op,
        "norm": _norm(one.vector),
        "scale": one.scale,
        "min": one.low,
        "max": one.high,
        "norm_match": one.norm_match,
        "positions": describe_positions(one.positions),
        **{name: getattr(details, name) for name in OWN_FIELDS.get(one.op, ())},
    }
    if details.feature is not None:
        described |= details.feature.as_dict()
    if details.when is not None:
        described["when"] = details.when.as_dict()
    return described
