# SPDX-License-Identifier: Apache-2.0
"""Conditions: a probe decides, token by token, whether an entry acts.

These records are sent to the engine core and the workers. This module imports neither
torch nor the rest of steering, because `vllm.sampling_params` imports it.
"""

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Scope: TypeAlias = Literal["token", "rest", "prompt"]

SCOPES: tuple[Scope, ...] = ("token", "rest", "prompt")
"""Tokens for which a decision holds. `token`: only the token that was probed. `rest`:
that token and all later ones, from the first token that fires, in the prompt too where
the entry acts there. `prompt`: all generated tokens; the last token of the prompt
decides, or the mean over the prompt."""

MAX_CONDITIONS = 8
"""Most distinct conditions of one request, and likewise of the engine's global
vectors."""


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """One gate: a probe's value `v = x . probe + bias`, compared with a threshold."""

    layer: int
    """The `(layer, hook)` at which the probe reads."""
    hook: str
    probe: bytes
    """The probe's direction: float32 `[width]` of the rows that it reads, normalized
    where `cosine` is set."""
    bias: float
    cosine: bool
    """Whether `x . probe` is divided by `|x|`."""
    above: bool
    """Whether the condition fires above the threshold, rather than below it."""
    threshold: float
    sharpness: float
    """Slope of a soft gate `sigmoid(sharpness (v - threshold))`, whose argument changes
    sign if `above` is false. 0 stands for a hard gate: 0 or 1."""
    scope: Scope
    name: str
    """The probe's name for reports; empty where the probe is given by value."""
    mean: bool = False
    """Whether the mean over the prompt decides, for the scope `prompt`, instead of the
    prompt's last token."""
    in_prompt: bool = False
    """Whether prompt tokens decide too, for the scope `rest`."""

    @property
    def needs_prompt(self) -> bool:
        """Whether all tokens of the prompt must be computed, cached or not."""
        return self.mean or self.in_prompt

    @property
    def tap(self) -> tuple[int, str]:
        """The `(layer, hook)` at which the probe reads."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """The probe's direction: float32 `[width]`, a view of `probe`."""
        return np.frombuffer(self.probe, dtype=np.float32)

    def as_dict(self) -> dict[str, Any]:
        """The condition as plain data for a response, without the probe's numbers."""
        return {
            "probe": self.name or None,
            "layer": self.layer,
            "hook": self.hook,
            "cosine": self.cosine,
            "above" if self.above else "below": self.threshold,
            "sharpness": self.sharpness or None,
            "scope": self.scope,
        } | ({"reduce": "mean"} if self.mean else {})


_ORDERS = (
    ("attn_in", "q", "k", "v", "z", "attn_out", "attn_add"),
    ("attn_in", "q", "k", "v", "z", "attn_out", "post_attn"),
    ("mlp_in", "mlp_act", "mlp_out", "mlp_add"),
    ("mlp_in", "router_logits", "expert_ids", "expert_weights", "mlp_out", "mlp_add"),
)
"""Hook points of one layer in the order in which every model computes them, in addition
to `embed`, `final_norm` and what enters and leaves the block. In a parallel block the
MLP reads the stream before `post_attn`, in others after it."""
_ENTERING, _LEAVING = ("pre_attn", "streams_pre"), ("post_block", "streams_post")


def is_known_at(probe: tuple[int, str], entry: tuple[int, str]) -> bool:
    """Whether the probe's input is computed before the entry acts, in every model."""
    (layer, hook), (acts, point) = probe, entry
    if layer != acts or hook == point:
        return layer <= acts
    if hook == "final_norm" or point == "embed":
        return False
    return (
        hook in ("embed", *_ENTERING)
        or point == "final_norm"
        or (point in _LEAVING and hook not in _LEAVING)
        or any(
            order.index(hook) < order.index(point)
            for order in _ORDERS
            if hook in order and point in order
        )
    )
