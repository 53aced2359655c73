# SPDX-License-Identifier: Apache-2.0
"""Conditions: a probe decides, token by token, whether an entry acts.

These records are sent to the engine core and the workers. This module imports neither
torch nor the rest of steering, because `vllm.sampling_params` imports it.
"""

from collections.abc import Iterable
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
    """The probe's direction: float32 `[hidden_size]`, normalized where `cosine` is
    set."""
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
        """The probe's direction: float32 `[hidden_size]`, a view of `probe`."""
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


def distinct(conditions: Iterable[Condition | None]) -> tuple[Condition, ...]:
    """The distinct conditions, in order of first occurrence."""
    return tuple(dict.fromkeys(one for one in conditions if one is not None))


_BEFORE = {("mlp_in", "mlp_out"), ("mlp_in", "mlp_add"), ("mlp_out", "mlp_add")}
"""Pairs of hook points of one layer of which the first is always computed before the
second, in addition to `pre_attn`, which comes before all but `embed`, and `post_block`,
which comes after all. In a parallel block the MLP reads the stream before `post_attn`,
in others after it."""


def is_known_at(probe: tuple[int, str], entry: tuple[int, str]) -> bool:
    """Whether the probe's input is computed before the entry acts, in every model."""
    (layer, hook), (acts, point) = probe, entry
    if layer != acts:
        return layer < acts
    return (
        hook == point
        or (hook == "pre_attn" and point != "embed")
        or point == "post_block"
        or (hook, point) in _BEFORE
    )
