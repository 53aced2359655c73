# SPDX-License-Identifier: Apache-2.0
"""A feature of a sparse autoencoder that an entry sets, adds to or scales.

The form that travels. This module imports neither torch nor the rest of steering,
because `vllm.sampling_params` imports it.
"""

from typing import Any, Literal, TypeAlias

import msgspec

Mode: TypeAlias = Literal["set", "add", "scale"]

MODES: tuple[Mode, ...] = ("set", "add", "scale")


class FeatureUse(msgspec.Struct, frozen=True, array_like=True):
    """What the activation of one feature shall be."""

    sae: str
    """The name of the SAE."""
    fingerprint: str
    """Of its weights: another SAE may get the name."""
    feature: int
    value: float
    mode: Mode = "set"
    only_if_active: bool = False
    """Whether tokens at which the feature is 0 stay as they are."""

    @property
    def amounts(self) -> tuple[float, float]:
        """`(c0, c1)`: of an activation a the decoder row is added `c0 + c1 a` times."""
        if self.mode == "set":
            return self.value, -1.0
        if self.mode == "add":
            return self.value, 0.0
        return 0.0, self.value - 1.0

    @property
    def needs_activation(self) -> bool:
        """Whether what it does depends on the present activation."""
        return self.mode != "add" or self.only_if_active

    def told(self) -> dict[str, Any]:
        """As an answer tells it."""
        return {
            "sae": self.sae,
            "feature": self.feature,
            "value": self.value,
            "mode": self.mode,
            "only_if_active": self.only_if_active,
        }
