# SPDX-License-Identifier: Apache-2.0
"""Records of what steering has done to tokens, which are sent between processes."""

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Doses: TypeAlias = npt.NDArray[np.float32]


FiredLabel: TypeAlias = tuple[str, int, str]
"""Name of a condition's probe (empty if it has none), its layer and hook point."""
Fired: TypeAlias = list[tuple[str, int, str, int]]
"""Labels, each with a number of tokens at which such a condition has fired."""
WAITING: FiredLabel = "*waiting", -1, ""
"""The label under which steps are counted in which requests waited for a slot."""


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """Something that is measured: an operation, the sum of additions, a condition."""

    layer: int
    """The `(layer, hook)` at which it acts, or at which the probe reads."""
    hook: str
    op: str
    """Name of the operation, or `WHEN`."""
    key: str
    """Equal for what is the same in prompt and generated tokens."""
    probe: str = ""
    """Name of the condition's probe; empty if it has none."""
    scope: str = ""
    """Scope of the condition."""


class ReceiptPart(msgspec.Struct, array_like=True):
    """The doses of some consecutive tokens of a request."""

    start: int
    """Position of the first token."""
    effects: tuple[Effect, ...]
    doses: np.ndarray
    """float32 `[tokens, len(effects)]`: the norm of the change over the norm of the
    stream before it, or a condition's gate; NaN where the token's program does not have
    the effect."""

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.doses)

    def between(self, low: int, high: int) -> "ReceiptPart | None":
        """The part at positions `[low, high)`; None if it has none there."""
        first, last = max(low, self.start), min(high, self.stop)
        if first >= last:
            return None
        if (first, last) == (self.start, self.stop):
            return self
        rows = slice(first - self.start, last - self.start)
        return ReceiptPart(first, self.effects, self.doses[rows])


class StepReceipt(msgspec.Struct, array_like=True):
    """A step's doses for a request."""

    start: int
    """Position of the request's first token in the step, as the worker assumed it.

    With draft tokens it may be too large; the engine core corrects it.
    """
    parts: list[ReceiptPart]
