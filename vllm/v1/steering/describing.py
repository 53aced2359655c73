# SPDX-License-Identifier: Apache-2.0
"""Vectors as answers tell of them: where they are and how long."""

from typing import Any

import numpy as np

from vllm.v1.steering.plan import PackedVectors, SteeringTiers

FIELDS = {
    "base": "vectors",
    "prefill": "prefill_vectors",
    "decode": "decode_vectors",
}


def describe(tiers: SteeringTiers) -> dict[str, Any]:
    """`{tier: {hook: {layer: {"norm": n}}}}`; norms are those of scaled vectors."""
    return {name: _norms(getattr(tiers, tier)) for tier, name in FIELDS.items()}


def _norms(packed: PackedVectors | None) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (layer, hook), vector in (packed.unpack() if packed else {}).items():
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        found.setdefault(hook, {})[str(layer)] = {"norm": norm}
    for one in packed.operations if packed else ():
        at = found.setdefault(one.hook, {}).setdefault(str(one.layer), {})
        at.setdefault("operations", []).append(
            {
                "op": one.op,
                "norm": float(np.linalg.norm(one.vector.astype(np.float64))),
                "scale": one.scale,
                "min": one.low,
                "max": one.high,
                "norm_match": one.norm_match,
                "positions": None if one.positions is None else list(one.positions),
            }
        )
    return found
