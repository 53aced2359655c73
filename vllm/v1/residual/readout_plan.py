# SPDX-License-Identifier: Apache-2.0
"""A request's resolved readouts, as sent to the engine core and the workers.

Built once, at admission. This module does not import torch, because
`vllm.sampling_params` imports it through the capture plan.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from vllm.v1.residual.spans import Spans, merged
from vllm.v1.residual.tap import Tap, behind

Packed: TypeAlias = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Arrays by name: dtype, shape and data in row-major order."""
MAX_PACKED = 4096
"""Largest size of an array, in bytes, that is packed with its part."""

Kind: TypeAlias = Literal[
    "rows", "probe", "lens", "sae", "norm", "custom", "attention", "attribution"
]
Reduce: TypeAlias = Literal["none", "mean", "sum", "max", "last"]
Activation: TypeAlias = Literal["none", "relu", "sigmoid", "softmax", "jumprelu"]


REST, ATTN_REST = "rest", "attn_rest"
"""Components of an attribution that have what no other has: of the logit, and of what
attention adds, where its heads are components."""
NEVER_AFTER: tuple[Kind, ...] = ("attention", "attribution")
"""Kinds that read the values before a change only."""
ADDED: dict[str, tuple[str, ...]] = {
    "embed": ("pre_attn",),
    "attn_add": ("pre_attn", "post_attn"),
    ATTN_REST: ("pre_attn", "post_attn"),
    "mlp_add": ("post_attn", "post_block"),
    REST: ("post_block",),
}
"""The points before and behind what a component of the stream adds."""


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """A probe given in the request."""

    vectors: bytes
    """float32 `[k, hidden_size]`, row-major."""
    bias: tuple[float, ...]
    """`[k]`."""
    activation: Activation = "none"
    cosine: bool = False
    """Whether rows and vectors are normalised to length 1 first."""
    threshold: tuple[float, ...] = ()
    """`[k]`, for `jumprelu`."""


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """What is read of rows that are not as wide as the stream, or of some heads."""

    each: int
    """Staging rows that a row takes."""
    width: int
    """Numbers per row."""
    heads: tuple[int, ...] = ()
    """The heads that are read, in this order; empty for whole rows."""
    head_size: int = 0

    @property
    def read(self) -> int:
        """Numbers that are read of a row."""
        return len(self.heads) * self.head_size or self.width


class Readout(msgspec.Struct, frozen=True, array_like=True):
    """One named readout of a request."""

    name: str
    kind: Kind
    taps: tuple[Tap, ...]
    """`(layer, hook)` of the rows that are read, in the order of the results."""
    ranges: Spans
    """Token positions `[start, stop)`, ascending."""
    module: str = ""
    """Registered name of the probe, translator or SAE, or of the entry point."""
    probe: Probe | None = None
    """For `kind` probe without a module."""
    reduce: Reduce = "none"
    top_k: int = 0
    tokens: tuple[int, ...] = ()
    """Token ids whose log-probabilities a lens returns in addition."""
    features: tuple[int, ...] = ()
    """Features of an SAE; empty means the `top_k` largest."""
    params: str = ""
    """Parameters of a custom readout, as JSON."""
    step: bool = False
    """Whether the rows are for a consumer that runs within the step (`module`), which
    returns no result."""
    code: bytes = b""
    """The function of a custom readout that has no entry point, by cloudpickle."""
    heads: tuple[int, ...] = ()
    """The heads whose patterns are read, of attention, or which are components."""
    keys: tuple[int, ...] = ()
    """Token positions whose weights are read; empty means the `top_k` largest."""
    full: bool = False
    """Whether the weights of all keys are read, of one layer."""
    after: int = -1
    """The model's last layer, if the rows are read behind what is done at their taps;
    -1 if before it, -2 if the request says so."""
    part: RowPart | None = None
    """What is read of each row; None for a whole row as wide as the stream. Of
    attention always None."""
    alone: tuple[Tap, ...] = ()
    """Of a norm: the taps whose point the layer before does not have."""

    @property
    def staged(self) -> tuple[Tap, ...]:
        """The taps whose rows must be staged, `taps` first.

        A norm also needs the layer before each of its taps, for the cosine; the taps of
        an attribution are differences of points, of which the end of the stream is the
        last.
        """
        if self.kind == "attribution":
            points = {
                (layer, point): None
                for layer, name in self.taps[:-1]
                for point in ADDED.get(name, ())
            }
            end = self.taps[-1][0], ADDED[REST][0]
            points.pop(end, None)
            return *points, end, *self.inside
        taps = self.taps
        if self.kind == "norm":
            before = [
                (layer - 1, hook)
                for layer, hook in taps
                if layer > 0 and (layer, hook) not in self.alone
            ]
            taps += tuple(tap for tap in before if tap not in taps)
        return tuple([behind(t, self.after) for t in taps]) if self.after >= 0 else taps

    @property
    def inside(self) -> tuple[Tap, ...]:
        """Of an attribution by heads: the points inside the block that it reads."""
        layers = [layer for layer, name in self.taps if name == ATTN_REST]
        return tuple((layer, point) for layer in layers for point in ("attn_add", "z"))


class Refusals(msgspec.Struct, frozen=True):
    """Why the loaded model does not support readouts of a kind."""

    lens: str = ""
    """Empty if a lens can use its head."""
    attribution: str = ""
    """Empty if a linear form of its norm and head is known."""
    attention: dict[int, str] = {}
    """By layer with the point `q`, where patterns are not computed."""
    heads: str = ""
    """Empty if heads can be components of an attribution."""
    projections: tuple[int, ...] = ()
    """The layers whose heads can be."""


class StopWhen(msgspec.Struct, frozen=True, array_like=True):
    """Ends the request at the first generated token whose value crosses a bound."""

    readout: str
    above: float | None = None
    below: float | None = None
    index: int = 0
    """Index into the readout's values; for an SAE the feature."""

    def fires(self, value: float) -> bool:
        """Whether the value ends the request; NaN never does."""
        over = self.above is not None and value > self.above
        return over or (self.below is not None and value < self.below)


class KeepWhen(msgspec.Struct, frozen=True, array_like=True):
    """A consumer gets rows only if, or where, a readout fires."""

    instance: str
    rule: StopWhen
    scope: Literal["request", "token"] = "request"
    before: int = 0
    """For `token`: as many positions before one that fires are kept."""
    after: int = 0


class ReadoutReader(msgspec.Struct, frozen=True, array_like=True):
    """A consumer instance that takes results of readouts, besides any rows."""

    instance: str
    names: tuple[str, ...]
    """Of the readouts."""


class ReadoutPlan(msgspec.Struct, frozen=True, array_like=True):
    """The readouts and stop conditions of one request."""

    readouts: tuple[Readout, ...]
    stop_when: tuple[StopWhen, ...] = ()
    readers: tuple[ReadoutReader, ...] = ()
    """The consumers that take results."""
    keep_when: tuple[KeepWhen, ...] = ()
    result_bytes: int = 0
    """Most bytes that the results of all samples take in the front end."""

    @property
    def staged(self) -> dict[Tap, Spans]:
        """The positions to stage at each tap."""
        wanted: dict[Tap, Spans] = {}
        for readout in self.readouts:
            for tap in readout.staged:
                wanted[tap] = merged((*readout.ranges, *wanted.get(tap, ())))
        return wanted


class ReadoutRows(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One array of a readout's result at one tap, as a consumer takes rows."""

    name: str
    """Of the readout."""
    kind: Kind
    array: str
    tap: Tap
    positions: list[int]
    """Ascending. If `reduced`, those that the only row was computed from."""
    dtype: str
    """The dtype's name in NumPy and torch."""
    shape: tuple[int, ...]
    """Of one row's value; `()` for a number."""
    data: bytes
    """The values in row-major order."""
    reduced: bool = False
    error: str = ""
    """Why the result is incomplete; empty if it is complete."""

    @property
    def hook(self) -> str:
        """The key's hook, such as `post_block.lens.logprobs`."""
        return f"{self.tap[1]}.{self.name}.{self.array}"


class ReadoutPart(msgspec.Struct, array_like=True):
    """One step's results for one readout of a request."""

    name: str
    start: int
    """Token position of the first token; the positions are consecutive."""
    count: int
    """Tokens that the arrays cover."""
    arrays: dict[str, np.ndarray]
    """NumPy arrays by name: `[count, ...]`, or without `count` if reduced."""
    reduced: bool = False
    """Whether the arrays hold one value for all tokens."""
    error: str = ""
    """Why there is no result; empty if there is."""
    packed: Packed = {}
    """Small arrays, between processes.

    Each array is a message of its own otherwise, and a step has dozens of them.
    """

    def pack(self) -> None:
        """Move small arrays to `packed`."""
        for name, one in list(self.arrays.items()):
            if one.nbytes <= MAX_PACKED:
                self.packed[name] = one.dtype.str, one.shape, one.tobytes()
                del self.arrays[name]

    def unpack(self) -> None:
        """Move the arrays back, which are read-only then."""
        for name, (dtype, shape, data) in self.packed.items():
            self.arrays[name] = np.frombuffer(data, dtype).reshape(shape)
        self.packed = {}


class RequestReadouts(msgspec.Struct, array_like=True):
    """One step's results for a request."""

    start: int
    """Token position of the request's first row in the step, as the worker assumed it.

    With draft tokens it may be too large; the scheduler corrects it.
    """
    parts: list[ReadoutPart]


StepReadouts: TypeAlias = dict[str, RequestReadouts]
"""The results of a step, by request id."""


class ReadoutCounters(msgspec.Struct):
    """Totals of one kind of readout in one process."""

    rows: int = 0
    """Rows that were read out."""
    seconds: float = 0.0
    """CPU seconds that it took to queue the computation."""
