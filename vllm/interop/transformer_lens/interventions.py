# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' hook points and declarative interventions as ours."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.interop.prompt_rows import Tap

NAMES = {
    "pre_attn": ("hook_in", "hook_resid_pre"),
    "post_attn": ("ln2.hook_in", "hook_resid_mid"),
    "post_block": ("hook_out", "hook_resid_post"),
    "mlp_in": ("mlp.hook_in",),
    "mlp_out": ("mlp.hook_out", "hook_mlp_out"),
}
"""Our hook points under TransformerLens' names: the bridge's, then the older ones."""


def names_of(layers: int, mlp_points: bool) -> dict[str, Tap]:
    """Every name of a hook point, with ours.

    Args:
        layers: of the model.
        mlp_points: whether the engine has hook points at the MLP.

    """
    points = ["pre_attn", "post_attn", "post_block"]
    if mlp_points:
        points += ["mlp_in", "mlp_out"]
    return {
        f"blocks.{layer}.{name}": (layer, hook)
        for hook in points
        for name in NAMES[hook]
        for layer in range(layers)
    }


def entry_of(name: str, spec: Any, width: int) -> dict[str, Any]:
    """The steering entry of one of TransformerLens' declarative interventions."""
    if not isinstance(spec, Mapping):
        raise NotImplementedError(
            f"intervene[{name!r}]: an engine takes a declarative spec such as "
            "{'op': 'scale', 'factor': 0.5}, not a function"
        )
    known = {"op", "factor", "value", "pos"}
    if extra := sorted(spec.keys() - known):
        raise ValueError(
            f"intervene[{name!r}] has no key {extra[0]!r}; its keys are {sorted(known)}"
        )
    entry = _operation(name, spec, width)
    if (positions := spec.get("pos")) is not None:
        entry["positions"] = [positions] if isinstance(positions, int) else positions
    return entry


def _operation(name: str, spec: Mapping[str, Any], width: int) -> dict[str, Any]:
    zeros = np.zeros(width, np.float32)
    match spec.get("op"):
        case "suppress":
            return {"op": "replace", "vector": zeros}
        case "scale":
            # (1 - alpha) x + alpha 0
            return {"op": "replace", "vector": zeros, "alpha": 1.0 - spec["factor"]}
        case "add" | "set" as op:
            value = np.asarray(spec["value"], dtype=np.float32)
            if value.size not in (1, width):
                raise ValueError(
                    f"intervene[{name!r}].value has {value.size} elements; the hook "
                    f"point is {width} wide"
                )
            vector = np.broadcast_to(value.reshape(-1), (width,)).copy()
            return {"op": "add" if op == "add" else "replace", "vector": vector}
        case other:
            raise ValueError(
                f"intervene[{name!r}].op={other!r}: use 'suppress', 'scale', 'add' or "
                "'set'"
            )
