# SPDX-License-Identifier: Apache-2.0
"""Descriptions of vectors for responses: places and norms."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.v1.residual.spans import describe_positions
from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.operations import Details, Operation, OpName
from vllm.v1.steering.plan import PackedVectors, SteeringTiers, Vector
from vllm.v1.steering.spec.entry import VectorUse
from vllm.v1.steering.spec.parse import Entry, Parsed

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
        {"tier": FIELDS[tier], **_entry(entry)}
        for tier, one in parsed.items()
        for entry in one.entries
    ]


def _entry(entry: Entry) -> dict[str, Any]:
    layer, hook = entry.tap
    use = entry.use
    return {
        "hook": hook,
        "layer": layer,
        "op": use.op,
        "norm": _norm(entry.vector),
        "scale": entry.scale,
        "min": use.low,
        "max": use.high,
        "norm_match": use.norm_match,
        "positions": describe_positions(use.positions),
        **_own(use.op, use),
        **_more(use.when, use.feature),
    }


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _norms(packed: PackedVectors | None) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (layer, hook), vector in (packed.unpack() if packed else {}).items():
        found.setdefault(hook, {})[str(layer)] = {"norm": _norm(vector)}
    for one in packed.operations if packed else ():
        at = found.setdefault(one.hook, {}).setdefault(str(one.layer), {})
        at.setdefault("operations", []).append(_operation(one))
    return found


def _operation(one: Operation) -> dict[str, Any]:
    return {
        "op": one.op,
        "norm": _norm(one.vector),
        "scale": one.scale,
        "min": one.low,
        "max": one.high,
        "norm_match": one.norm_match,
        "positions": describe_positions(one.positions),
        **_own(one.op, one.details),
        **_more(one.details.when, one.details.feature),
    }


def _own(op: OpName, details: VectorUse | Details) -> dict[str, Any]:
    """The fields that only entries of this operation have."""
    return {name: getattr(details, name) for name in OWN_FIELDS.get(op, ())}


def _more(when: Condition | None, feature: FeatureUse | None) -> dict[str, Any]:
    """The fields that only some entries have."""
    found: dict[str, Any] = {}
    if feature is not None:
        found |= feature.as_dict()
    return found if when is None else {**found, "when": when.as_dict()}
