# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' hook points and declarative interventions as ours."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.numbers import is_finite, is_integer
from vllm.v1.residual.tap import Tap

NAMES = {
    "pre_attn": ("hook_in", "hook_resid_pre"),
    "post_attn": ("ln2.hook_in", "hook_resid_mid"),
    "post_block": ("hook_out", "hook_resid_post"),
    "mlp_in": ("mlp.hook_in",),
    "mlp_out": ("mlp.hook_out",),
    "embed": ("hook_embed",),
    "attn_add": ("hook_attn_out",),
    "mlp_add": ("hook_mlp_out",),
}
"""Our hook points under TransformerLens' names: the bridge's, then the older ones."""

KEYS = {
    "suppress": ("op", "pos"),
    "scale": ("op", "pos", "factor"),
    "add": ("op", "pos", "value"),
    "set": ("op", "pos", "value"),
}
"""The keys of a spec, by its operation."""


def names_of(points: Mapping[int, Collection[str]]) -> dict[str, Tap]:
    """TransformerLens' names of hook points, with ours; some have none there.

    Args:
        points: the hook points of each layer.

    """
    return {
        f"blocks.{layer}.{name}": (layer, point)
        for layer, having in points.items()
        for point in having
        for name in NAMES.get(point, ())
    }


@dataclass(frozen=True, slots=True)
class Intervention:
    """What is done at one hook point: `(1 - alpha) x + alpha v`, or `x + v`."""

    vector: npt.NDArray[np.float32]
    """v, `[width]`"""
    alpha: float | None
    """None adds the vector."""
    positions: list[int] | None
    """Positions in the prompt, negative ones from its end; None for every token."""

    def entry(self) -> dict[str, Any]:
        """The same as an entry of `steering_vectors`."""
        entry: dict[str, Any] = {"op": "add", "vector": self.vector}
        if self.alpha is not None:
            entry |= {"op": "replace", "alpha": self.alpha}
        if self.positions is not None:
            entry["positions"] = self.positions
        return entry

    def applied(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a prompt `[tokens, width]` after the intervention.

        The engine captures them before it; in TransformerLens captures come after.
        """
        at: Any = slice(None) if self.positions is None else self.positions
        changed, vector = rows.clone(), torch.from_numpy(self.vector)
        stream = rows[at].float()
        if self.alpha is None:
            stream = stream + vector
        else:
            stream = (1.0 - self.alpha) * stream + self.alpha * vector
        changed[at] = stream.to(rows.dtype)
        return changed


def parsed(name: str, spec: Any, width: int) -> Intervention:
    """Parse one of TransformerLens' declarative interventions.

    Args:
        name: the hook point, for messages.
        spec: `{"op": "suppress" | "scale" | "add" | "set", "factor" | "value", "pos"}`.
        width: of the hook point.

    Raises:
        NotImplementedError: it is a function.
        ValueError: it is invalid; the message names the key and the remedy.

    """
    where = f"intervene[{name!r}]"
    if not isinstance(spec, Mapping):
        raise NotImplementedError(
            f"{where}: an engine takes a declarative spec such as "
            "{'op': 'scale', 'factor': 0.5}, not a function"
        )
    op = spec.get("op")
    if not isinstance(op, str) or op not in KEYS:
        raise ValueError(f"{where}.op={op!r}: use one of {list(KEYS)}")
    if extra := sorted(map(str, spec.keys() - set(KEYS[op]))):
        raise ValueError(
            f"{where} has no key {extra[0]!r}; the keys of {op!r} are {list(KEYS[op])}"
        )
    if missing := [key for key in KEYS[op][2:] if key not in spec]:
        raise ValueError(f"{where}: {op!r} needs the key {missing[0]!r}")
    positions = _positions(where, spec.get("pos"))
    vector, alpha = np.zeros(width, np.float32), 1.0
    if op == "scale":
        alpha = 1.0 - _number(f"{where}.factor", spec["factor"])
    elif op != "suppress":
        vector = _vector(f"{where}.value", spec["value"], width)
    return Intervention(vector, None if op == "add" else alpha, positions)


def _positions(where: str, raw: Any) -> list[int] | None:
    if raw is None:
        return None
    if isinstance(raw, (torch.Tensor, np.ndarray)):
        raw = raw.tolist()
    listed = [raw] if is_integer(raw) else raw
    if (
        not isinstance(listed, Sequence)
        or not listed
        or not all(map(is_integer, listed))
    ):
        raise ValueError(f"{where}.pos={raw!r}: give a position or a list of them")
    return [int(one) for one in listed]


def _number(where: str, raw: Any) -> float:
    if not is_finite(raw):
        raise ValueError(f"{where}={raw!r}: give a finite number")
    return float(raw)


def _vector(where: str, raw: Any, width: int) -> npt.NDArray[np.float32]:
    """A number or `width` numbers as float32 `[width]`."""
    try:
        values = torch.as_tensor(raw).detach().float().cpu().numpy().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: give a number or {width} numbers") from error
    if values.size not in (1, width):
        raise ValueError(
            f"{where} has {values.size} elements; the hook point is {width} wide"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{where}: all numbers must be finite")
    return np.broadcast_to(values, (width,)).copy()
