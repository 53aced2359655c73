# SPDX-License-Identifier: Apache-2.0
"""Operations on one feature of a sparse autoencoder (SAE).

These records are sent to the engine core and the workers. This module imports neither
torch nor the rest of steering, because `vllm.sampling_params` imports it.
"""

from typing import Any, Literal, TypeAlias

import msgspec

Mode: TypeAlias = Literal["set", "add", "scale"]

MAX_CARRIED = 16
"""Most features of transcoders whose activations one request uses, and likewise the
engine's global vectors."""

MODES: tuple[Mode, ...] = ("set", "add", "scale")


class FeatureUse(msgspec.Struct, frozen=True, array_like=True):
    """How one feature's activation is changed."""

    sae: str
    """The SAE's registered name."""
    fingerprint: str
    """Fingerprint of the SAE's weights, because a name may be reused for another
    SAE."""
    feature: int
    value: float
    mode: Mode = "set"
    only_if_active: bool = False
    """Whether only tokens with a nonzero activation of the feature are changed."""
    reads: tuple[int, str] | None = None
    """For a transcoder the `(layer, hook)` at which it reads; None for an SAE, which
    reads where it writes."""

    @property
    def amounts(self) -> tuple[float, float]:
        """`(c0, c1)`: for activation a the decoder row is added `c0 + c1 a` times."""
        if self.mode == "set":
            return self.value, -1.0
        if self.mode == "add":
            return self.value, 0.0
        return 0.0, self.value - 1.0

    @property
    def needs_activation(self) -> bool:
        """Whether the change depends on the current activation."""
        return self.mode != "add" or self.only_if_active

    @property
    def carries(self) -> bool:
        """Whether the activation is carried from one hook point to another."""
        return self.reads is not None and self.needs_activation

    def as_dict(self) -> dict[str, Any]:
        """The operation as plain data for a response."""
        return {
            "sae": self.sae,
            "feature": self.feature,
            "value": self.value,
            "mode": self.mode,
            "only_if_active": self.only_if_active,
        }
