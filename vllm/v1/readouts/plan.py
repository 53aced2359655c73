# SPDX-License-Identifier: Apache-2.0
"""What a request reads out, resolved: the form that travels to core and workers.

Made once, at admission. This module imports neither torch nor the rest of readouts,
because `vllm.sampling_params` imports it by way of the capture plan.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np

Tap: TypeAlias = tuple[int, str]
Ranges: TypeAlias = tuple[tuple[int, int], ...]

Kind: TypeAlias = Literal["rows", "probe", "lens", "sae", "norm", "custom"]
Reduce: TypeAlias = Literal["none", "mean", "sum", "max", "last"]
Activation: TypeAlias = Literal["none", "relu", "sigmoid", "softmax", "jumprelu"]


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """Directions that a request brings along."""

    vectors: bytes
    """float32 `[k, hidden_size]`, row-major."""
    bias: tuple[float, ...]
    """`[k]`."""
    activation: Activation = "none"
    cosine: bool = False
    """Whether rows and vectors are brought to length 1 first."""
    threshold: tuple[float, ...] = ()
    """`[k]`, for `jumprelu`."""


class Readout(msgspec.Struct, frozen=True, array_like=True):
    """One named readout of a request."""

    name: str
    kind: Kind
    taps: tuple[Tap, ...]
    """Whose rows it is about, in the order in which the results have them."""
    ranges: Ranges
    """The token positions that it is about."""
    module: str = ""
    """The probe, translator, SAE or entry point, by its name on the server."""
    probe: Probe | None = None
    """With `kind` probe, where no module is named."""
    reduce: Reduce = "none"
    top_k: int = 0
    tokens: tuple[int, ...] = ()
    """Whose log-probabilities a lens gives besides."""
    features: tuple[int, ...] = ()
    """Of an SAE; empty means the `top_k` largest."""
    params: str = ""
    """JSON: what a custom readout is given."""

    @property
    def staged(self) -> tuple[Tap, ...]:
        """The taps whose rows it needs, `taps` first."""
        if self.kind != "norm":
            return self.taps
        before = [(layer - 1, hook) for layer, hook in self.taps if layer > 0]
        return self.taps + tuple(tap for tap in before if tap not in self.taps)


class StopWhen(msgspec.Struct, frozen=True, array_like=True):
    """Ends the request at the first generated token whose value fires."""

    readout: str
    above: float | None = None
    below: float | None = None
    index: int = 0
    """Which of the readout's values; of an SAE, which feature."""

    def fires(self, value: float) -> bool:
        """Whether the value ends the request; NaN does not."""
        over = self.above is not None and value > self.above
        return over or (self.below is not None and value < self.below)


class ReadoutPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything the engine must know about the readouts of one request."""

    readouts: tuple[Readout, ...]
    stop_when: tuple[StopWhen, ...] = ()


class ReadoutPart(msgspec.Struct, array_like=True):
    """What one step found out for one readout of a request."""

    name: str
    start: int
    """Token position of the first row; the others follow it."""
    count: int
    """Rows that the values are about."""
    arrays: dict[str, np.ndarray]
    """NumPy arrays by name: `[count, ...]`, but for reduced rows."""
    reduced: bool = False
    """Whether the arrays hold one value for all rows."""
    error: str = ""


class RequestReadouts(msgspec.Struct, array_like=True):
    """What one step found out for a request."""

    start: int
    """Token position of the request's first row in the step, as the worker knew it."""
    parts: list[ReadoutPart]
