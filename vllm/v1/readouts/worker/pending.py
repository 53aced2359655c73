# SPDX-License-Identifier: Apache-2.0
"""A step's results while they are being copied from the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.readouts.firing import COMPARED, values_of
from vllm.v1.readouts.worker.jobs import Entry
from vllm.v1.readouts.worker.top_tokens import BEST, lens_arrays
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import (
    MAX_PACKED,
    Array,
    Fired,
    JobTokens,
    KeepWhen,
    Kind,
    ReadoutPart,
    StepReadouts,
    TokenRow,
    packed_form,
)
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.tap import Tap

logger = init_logger(__name__)

LENS_FAILED = (
    "the logits are not numbers: the stream overflowed, or another tensor-parallel "
    "rank failed, whose log then says why"
)
"""Error of a lens."""

ONE_TAP: tuple[Kind, ...] = ("probe", "sae")
"""Kinds that read a single tap, so that their results have no axis for taps."""
BY_ROW: tuple[Kind, ...] = (*ONE_TAP, "lens", "norm", "rows")
"""Kinds whose arrays have a value for each row of a job."""


@dataclass(slots=True)
class JobResult:
    """The results of one job."""

    entries: Sequence[Entry]
    shift: int
    """Added to the positions of the entries, which may be those of an earlier step."""
    arrays: dict[str, torch.Tensor]
    """On the host; valid once the copy is complete."""
    errors: dict[int, str] = field(default_factory=dict)
    """Error messages by index of the entry."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What is cached for later results of the same entries."""


@dataclass(slots=True)
class PendingReadouts:
    """The results of a step, possibly still being copied to the host."""

    results: list[JobResult]
    starts: Mapping[str, int]
    """Token position of each request's first row in the step, less `shift`."""
    shift: int = 0
    done: "torch.cuda.Event | None" = None
    kept: list[Any] = field(default_factory=list)
    """References to tensors that the device may still be reading."""
    split: Mapping[str, Mapping[str, tuple[Tap, ...]]] = field(default_factory=dict)
    """By request and name: the taps of readouts of which stages compute parts."""
    rules: Mapping[str, Sequence[KeepWhen]] = field(default_factory=dict)
    """By request: around which values its rows are kept."""
    told: Callable[[Fired], None] | None = None
    """Called with what these keep of the step."""

    def collect(self) -> StepReadouts:
        """Wait for the copies and return the results by request id."""
        if self.done is not None:
            self.done.synchronize()
        self.kept.clear()
        for result in self.results:
            if BEST in result.arrays:
                _open_lens(result)
        found = self._by_request()
        self._tell()
        return found

    def failed(self, text: str) -> StepReadouts:
        """The results, if they are an error."""
        for result in self.results:
            result.errors = dict.fromkeys(range(len(result.entries)), text)
            result.arrays = {}
        self.split = {}
        self._tell()
        return self._by_request()

    def _tell(self) -> None:
        if self.told is not None:
            own = [kept_of(result, self.rules) for result in self.results]
            self.told(list(chain.from_iterable(own)))

    def _by_request(self) -> StepReadouts:
        found: dict[str, list[ReadoutPart]] = {}
        pieces: dict[_Tokens, list[_Piece]] = {}
        tokens: list[JobTokens] = []
        for result in self.results:
            arrays = {name: one.numpy() for name, one in result.arrays.items()}
            singles = None if self.split else _tokens(result, arrays)
            if singles is not None:
                tokens.append(singles)
            for number, entry in enumerate(result.entries):
                if singles is not None and entry.count == 1:
                    continue
                part = _part(result, number, entry, arrays)
                if part.name not in self.split.get(entry.req_id, ()):
                    found.setdefault(entry.req_id, []).append(part)
                    continue
                place = entry.req_id, part.name, part.start, part.count, part.reduced
                pieces.setdefault(place, []).append((entry.readout.taps, part))
        for (req_id, name, *_), own in pieces.items():
            merged = _merged(self.split[req_id][name], own)
            found.setdefault(req_id, []).extend(merged)
        return StepReadouts(self.starts, self.shift, found, tokens)


_Tokens: TypeAlias = tuple[str, str, int, int, bool]
"""Request, readout, first position, count of tokens, and whether they are reduced."""
_Piece: TypeAlias = tuple[tuple[Tap, ...], ReadoutPart]
"""A part of a readout with some of its taps."""


def _merged(taps: Sequence[Tap], pieces: Sequence[_Piece]) -> list[ReadoutPart]:
    """The part with all taps, in their order; none if some are missing.

    An error of a stage is that of the whole part.
    """
    if failed := [one for _, one in pieces if one.error]:
        return failed[:1]
    having = [tap for own, _ in pieces for tap in own]
    if len(having) < len(taps):
        return []
    first, axis = pieces[0][1], 0 if pieces[0][1].reduced else 1
    order = [having.index(tap) for tap in taps]
    arrays = {
        label: np.concatenate([one.arrays[label] for _, one in pieces], axis)
        for label in first.arrays
    }
    arrays = {label: array.take(order, axis) for label, array in arrays.items()}
    return [
        ReadoutPart(first.name, first.start, first.count, arrays, reduced=first.reduced)
    ]


def _open_lens(result: JobResult) -> None:
    """Compute the arrays of a lens; NaN is an error.

    No number is the log-probability of its token.
    """
    best = result.arrays.pop(BEST).numpy()
    try:
        arrays = lens_arrays(best, result.entries[0].readout.top_k)
    except Exception as error:
        logger.exception("Readouts of the kind 'lens' failed")
        result.errors = dict.fromkeys(range(len(result.entries)), described(error))
        return
    result.arrays = {name: torch.from_numpy(one) for name, one in arrays.items()}
    missing = [np.isnan(one).any(1) for one in arrays.values() if one.dtype.kind == "f"]
    failed = np.any(missing, axis=0)
    for number, entry in enumerate(result.entries if failed.any() else ()):
        if failed[entry.first : entry.first + entry.num_rows].any():
            result.errors[number] = LENS_FAILED


def _tokens(result: JobResult, arrays: Mapping[str, Array]) -> JobTokens | None:
    """The packed values of entries with a single token.

    None if an array has no value for each row, if values are too large to be packed, or
    if an entry has failed.
    """
    entries = result.entries
    if not entries or entries[0].reduced or result.errors or not arrays:
        return None
    size = sum([one.nbytes for one in arrays.values()])
    if entries[0].readout.kind not in BY_ROW or size > MAX_PACKED * len(entries):
        return None
    columns = [one.reshape(len(one), -1).view(np.uint8) for one in arrays.values()]
    rows = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    key = "tokens", tuple([(k, one.dtype, one.shape) for k, one in arrays.items()])
    if key not in result.kept:
        result.kept[key] = _token_rows(entries, arrays, rows.shape[1])
    return JobTokens(result.kept[key], rows.tobytes(), result.shift)


def _token_rows(
    entries: Sequence[Entry], arrays: Mapping[str, Array], size: int
) -> dict[str, list[TokenRow]]:
    """By request: where the values of single tokens are in rows of `size` bytes."""
    found: dict[str, list[TokenRow]] = {}
    one_tap = entries[0].readout.kind in ONE_TAP
    form_of = cache(lambda taps: packed_form((1,) if one_tap else (1, taps), arrays))
    for entry in entries:
        if entry.count == 1:
            readout, first = entry.readout, entry.first
            taps = len(readout.taps)
            form = form_of(taps)
            until = (first + taps) * size  # Only the taps that it reads.
            row = TokenRow(readout.name, form, entry.start, first * size, until)
            found.setdefault(entry.req_id, []).append(row)
    return found


def _part(
    result: JobResult,
    number: int,
    entry: Entry,
    arrays: Mapping[str, Array],
) -> ReadoutPart:
    start = entry.start + result.shift
    name, error = entry.readout.name, result.errors.get(number, "")
    if error:
        return ReadoutPart(name, start, entry.count, {}, error=error)
    kind = entry.readout.kind
    if entry.reduced:
        own = {label: one[number] for label, one in arrays.items()}
    elif kind == "attention" and "all.weights" in arrays:
        found = {label.removeprefix("all."): one for label, one in arrays.items()}
        own = {label: one[number : number + 1] for label, one in found.items()}
    elif kind in ("attention", "attribution"):
        mine = f"{number}."
        own = {k.removeprefix(mine): v for k, v in arrays.items() if k.startswith(mine)}
    elif kind == "custom":
        own = {"values": arrays[str(number)]}
    elif kind in ONE_TAP:
        rows = slice(entry.first, entry.first + entry.count)
        own = {label: one[rows] for label, one in arrays.items()}
    else:
        staged, taps = len(entry.readout.staged), len(entry.readout.taps)
        rows = slice(entry.first, entry.first + entry.count * staged)
        own = {
            label: one[rows].reshape(entry.count, staged, *one.shape[1:])[:, :taps]
            for label, one in arrays.items()
        }
    return ReadoutPart(name, start, entry.count, own, reduced=entry.reduced)


class Comparison(NamedTuple):
    """What rules compare with the values of a job, one element for each value."""

    pairs: Sequence[tuple[int, KeepWhen]]
    """The number of an entry, and its rule."""
    pair_of: Array
    """Index in `pairs`."""
    offsets: Array
    """The token's index in its entry."""
    rows: Array
    columns: Array
    """Where the value is in what `_compared` returns."""
    above: Array
    below: Array


def kept_of(
    result: JobResult, rules: Mapping[str, Sequence[KeepWhen]]
) -> Iterator[tuple[str, int, int]]:
    """What rules keep of the requests of a job, as of `Fired`.

    That is everything from now on of requests whose readout has failed.
    """
    entries = result.entries
    for number in result.errors:
        if rules.get(entries[number].req_id):
            yield entries[number].req_id, 0, OPEN_END
    if "pairs" not in result.kept:
        result.kept["pairs"] = [
            (number, keep)
            for number, entry in enumerate(entries)
            for keep in rules.get(entry.req_id, ())
            if keep.rule.readout == entry.readout.name
        ]
    pairs: Sequence[tuple[int, KeepWhen]] = result.kept["pairs"]
    if not result.arrays or not pairs:
        return
    values = _compared(result, pairs)
    if "comparison" not in result.kept:
        result.kept["comparison"] = _comparison(entries, pairs, values.shape[1])
    own: Comparison = result.kept["comparison"]
    found = values[own.rows, own.columns].astype(np.float64)
    for at in np.flatnonzero((found > own.above) | (found < own.below)).tolist():
        number, keep = own.pairs[own.pair_of[at]]
        position = entries[number].start + result.shift + int(own.offsets[at])
        yield entries[number].req_id, *keep.around(position)


def _compared(result: JobResult, pairs: Sequence[tuple[int, KeepWhen]]) -> Array:
    """The values that rules may compare.

    `[R, values]` of each row of the job; of an SAE `[R, features]`, of the features
    that rules name; of a custom readout `[n, 1]` those of each pair in turn.
    """
    arrays = {name: one.numpy() for name, one in result.arrays.items()}
    readout = result.entries[0].readout
    if readout.kind == "custom":
        parts = [_part(result, n, result.entries[n], arrays) for n, _ in pairs]
        each = [values_of(p, readout, k.rule.index) for p, (_, k) in zip(parts, pairs)]
        return np.concatenate(each)[:, None]
    if readout.kind == "sae":
        whole = ReadoutPart("", 0, len(arrays["activations"]), arrays)
        each = [values_of(whole, readout, index) for index in _indices(pairs)]
        return np.stack(each, axis=1)
    found = arrays[COMPARED[readout.kind]]
    return found.reshape(len(found), -1)


def _indices(pairs: Sequence[tuple[int, KeepWhen]]) -> list[int]:
    return sorted({keep.rule.index for _, keep in pairs})


def _comparison(
    entries: Sequence[Entry], pairs: Sequence[tuple[int, KeepWhen]], size: int
) -> Comparison:
    """Where to find what each pair compares, in rows of `size` values."""
    own, indices = [entries[number] for number, _ in pairs], _indices(pairs)
    counts = [entry.count for entry in own]
    offsets = np.concatenate([np.arange(count) for count in counts])
    rows = np.repeat([entry.first for entry in own], counts)
    index = np.repeat([keep.rule.index for _, keep in pairs], counts)
    match entries[0].readout.kind:
        case "custom":
            rows, columns = np.arange(len(index)), np.zeros_like(index)
        case "sae":
            rows, columns = rows + offsets, np.searchsorted(indices, index)
        case _:
            staged = np.repeat([len(entry.readout.staged) for entry in own], counts)
            rows, columns = rows + offsets * staged + index // size, index % size
    above = [np.inf if k.rule.above is None else k.rule.above for _, k in pairs]
    below = [-np.inf if k.rule.below is None else k.rule.below for _, k in pairs]
    return Comparison(
        pairs,
        np.repeat(np.arange(len(pairs)), counts),
        offsets,
        rows,
        columns,
        np.repeat(above, counts),
        np.repeat(below, counts),
    )
