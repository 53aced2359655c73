# SPDX-License-Identifier: Apache-2.0
"""When an entry acts: a probe somewhere before it, and how its value decides.

The form that travels. This module imports neither torch nor the rest of steering,
because `vllm.sampling_params` imports it.
"""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Scope: TypeAlias = Literal["token", "rest", "prompt"]

SCOPES: tuple[Scope, ...] = ("token", "rest", "prompt")
"""What a decision holds for: its own token; that and all later ones, once it is to act;
all generated tokens, where it is made at the last one of the prompt."""

MAX_CONDITIONS = 8
"""Different ones of a request, and as many of the engine's own."""


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """A gate that a probe opens: `v = x . probe + bias`, against a threshold."""

    layer: int
    """Where the probe reads."""
    hook: str
    probe: bytes
    """float32 `[hidden_size]`; of length 1 where `cosine` is set."""
    bias: float
    cosine: bool
    """Whether `x . probe` is divided by `|x|`."""
    above: bool
    """Whether it fires above the threshold; else below."""
    threshold: float
    sharpness: float
    """Of a gate between 0 and 1: `sigmoid(sharpness (v - threshold))`, or with the
    sign turned; 0 for a gate that is open or shut."""
    scope: Scope
    name: str
    """Of the probe, if it has one, for reports."""

    @property
    def tap(self) -> tuple[int, str]:
        """Where the probe reads."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """The probe `[hidden_size]`; a view of the data."""
        return np.frombuffer(self.probe, dtype=np.float32)

    def told(self) -> dict[str, Any]:
        """As an answer tells it, without the probe's numbers."""
        return {
            "probe": self.name or None,
            "layer": self.layer,
            "hook": self.hook,
            "cosine": self.cosine,
            "above" if self.above else "below": self.threshold,
            "sharpness": self.sharpness or None,
            "scope": self.scope,
        }


def distinct(conditions: Iterable[Condition | None]) -> tuple[Condition, ...]:
    """Each condition once, in the order in which they come."""
    return tuple(dict.fromkeys(one for one in conditions if one is not None))


_BEFORE = {("mlp_in", "mlp_out")}
"""Hook points of one layer of which the first is always computed before the second,
besides `pre_attn`, which comes before all, and `post_block`, which comes after all. In
a parallel block the MLP reads the stream before `post_attn`, in others after it."""


def is_known_at(probe: tuple[int, str], entry: tuple[int, str]) -> bool:
    """Whether what a probe reads is computed when an entry acts, in every model."""
    (layer, hook), (acts, point) = probe, entry
    if layer != acts:
        return layer < acts
    return (
        hook == point
        or hook == "pre_attn"
        or point == "post_block"
        or (hook, point) in _BEFORE
    )
