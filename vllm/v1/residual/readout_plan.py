# SPDX-License-Identifier: Apache-2.0
"""A request's resolved readouts, as sent to the engine core and the workers.

Built once, at admission. This module does not import torch, because
`vllm.sampling_params` imports it through the capture plan.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from vllm.v1.residual.spans import Spans, merged
from vllm.v1.residual.tap import Tap, behind

MAX_PACKED = 4096
"""Largest size of an array, in bytes, that is packed with its part."""
Array: TypeAlias = np.ndarray[Any, Any]

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
    fingerprint: str = ""
    """Of the probe, translator or SAE; one that has replaced it is not used."""

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

    def around(self, position: int) -> tuple[int, int]:
        """The positions `[start, stop)` that are kept if it fires at this one."""
        return max(position - self.before, 0), position + self.after + 1


Fired: TypeAlias = Sequence[tuple[str, int, int]]
"""Requests of a step, and the positions `[start, stop)` that their rules keep."""


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


class Form(msgspec.Struct, frozen=True, array_like=True):
    """How packed arrays lie in memory: in rows, of the values of each array in turn."""

    axes: tuple[int, ...]
    """The first axes of each array; there are as many rows as their product."""
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and further axes of each array."""


class ReadoutPart(msgspec.Struct, array_like=True, gc=False):
    """One step's results for one readout of a request."""

    name: str
    start: int
    """Token position of the first token; the positions are consecutive."""
    count: int
    """Tokens that the arrays cover."""
    arrays: dict[str, np.ndarray]  # Upstream decodes this type, and no alias of it.
    """NumPy arrays by name: `[count, ...]`, or without `count` if reduced."""
    reduced: bool = False
    """Whether the arrays hold one value for all tokens."""
    error: str = ""
    """Why there is no result; empty if there is."""
    form: str = ""
    """The form of small arrays between processes, as JSON; empty without these.

    Each array is a message of its own otherwise, and a step has dozens of them.
    """
    data: bytes = b""
    """The values of these arrays."""

    def pack(self) -> None:
        """Move small arrays to `data`."""
        own = {k: v for k, v in self.arrays.items() if v.nbytes <= MAX_PACKED}
        if own:
            is_single = self.count == 1 and not self.reduced
            has_axis = all([one.shape[:1] == (1,) for one in own.values()])
            self.form = packed_form((1,) if is_single and has_axis else (), own)
            self.data = b"".join([one.tobytes() for one in own.values()])
            self.arrays = {k: v for k, v in self.arrays.items() if k not in own}

    def unpack(self) -> None:
        """Move the arrays back, which are read-only then."""
        if self.form:
            self.arrays |= unpacked(self.form, self.data)
            self.form, self.data = "", b""


def packed_form(axes: tuple[int, ...], arrays: Mapping[str, Array]) -> str:
    """The form of arrays whose first axes are rows, and in the form `axes`."""
    skipped = 1 if axes else 0
    own = [(k, one.dtype.str, one.shape[skipped:]) for k, one in arrays.items()]
    return _json_of(Form(axes, tuple(own)))


@lru_cache(1024)
def _json_of(form: Form) -> str:
    return msgspec.json.encode(form).decode()


@lru_cache(1024)
def _form_of(text: str) -> Form:
    return msgspec.json.decode(text, type=Form)


def is_by_token(form: str) -> bool:
    """Whether the first axis of the packed arrays is that of tokens."""
    return bool(form) and bool(_form_of(form).axes)


def unpacked(form: str, data: bytes, tokens: int | None = None) -> dict[str, Array]:
    """Arrays by name of packed values.

    Args:
        form: of one part.
        data: the values of the part, or of several one after another.
        tokens: the first axis, if there are several parts of one token each.

    """
    found = _form_of(form)
    axes = found.axes if tokens is None else (tokens, *found.axes[1:])
    sizes = [np.dtype(kind).itemsize * prod(own) for _, kind, own in found.arrays]
    rows = np.frombuffer(data, np.uint8).reshape(prod(axes), sum(sizes))
    arrays, at = {}, 0
    for (name, dtype, own), size in zip(found.arrays, sizes):
        values = np.ascontiguousarray(rows[:, at : at + size]).view(dtype)
        arrays[name] = values.reshape(*axes, *own)
        at += size
    return arrays


class TokenRow(NamedTuple):
    """Where the values of a single token are in the packed values of a job."""

    name: str
    """Of the readout."""
    form: str
    start: int
    """Token position, less the shift of the step."""
    first: int
    stop: int
    """Bytes in the values of the job."""


class JobTokens(NamedTuple):
    """What a job has computed for requests with a single token in the step."""

    rows: Mapping[str, Sequence[TokenRow]]
    """By request; the same object in steps with the same layout."""
    data: bytes
    shift: int


class RequestReadouts(NamedTuple):
    """One step's results for a request."""

    start: int
    """Token position of the request's first row in the step, as the worker assumed it.

    With draft tokens it may be too large; the scheduler corrects it.
    """
    parts: list[ReadoutPart]


class StepReadouts(NamedTuple):
    """The results of a step.

    Those of single tokens are made into parts one request at a time, as they are taken.
    """

    starts: Mapping[str, int]
    """Token position of each request's first row in the step, less `shift`."""
    shift: int
    parts: Mapping[str, list[ReadoutPart]]
    """By request."""
    tokens: Sequence[JobTokens] = ()

    def get(self, req_id: str) -> RequestReadouts | None:
        """The results of a request, if it has any."""
        parts = [*self._singles(req_id), *self.parts.get(req_id, ())]
        if not parts:
            return None
        parts.sort(key=attrgetter("start"))
        return RequestReadouts(self.starts[req_id] + self.shift, parts)

    def token_at(self, req_id: str, position: int) -> list[ReadoutPart] | None:
        """The results of a request, perhaps none; None if not all are at `position`."""
        if req_id in self.parts:
            return None
        parts = self._singles(req_id)
        for part in parts:
            if part.start != position:
                return None
        return parts

    def _singles(self, req_id: str) -> list[ReadoutPart]:
        parts = []
        for rows, data, shift in self.tokens:
            for name, form, start, first, stop in rows.get(req_id, ()):
                own = form, data[first:stop]
                parts.append(ReadoutPart(name, start + shift, 1, {}, False, "", *own))
        return parts


class ReadoutCounters(msgspec.Struct):
    """Totals of one kind of readout in one process."""

    rows: int = 0
    """Rows that were read out."""
    seconds: float = 0.0
    """CPU seconds that it took to queue the computation."""
