# SPDX-License-Identifier: Apache-2.0
"""Results of readouts as users get them, joined over steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.logger import init_logger
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import Readout, ReadoutPart
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from clearbox_client.readouts import Readout as ClientReadout

logger = init_logger(__name__)
Array = np.ndarray[Any, Any]

FULL_AXES = 3
"""Dimensions of full attention patterns, `[heads, n, context]`."""
MOST_ERRORS = 4
"""Most different errors that a result names."""


@dataclass(slots=True)
class ReadoutResult:
    """The result of one readout, `output.readouts[name]`.

    The contents of `arrays` depend on the kind. n is the number of tokens, in the order
    of `positions`, and taps the length of `taps`:

    - `rows`: `rows` `[n, taps, hidden_size]`, or `[taps, hidden_size]` if reduced;
    - `probe`: `values` `[n, k]`;
    - `lens`: `token_ids` and `logprobs` `[n, taps, top_k]`, and `token_logprobs`
      `[n, taps, tokens]` of the requested tokens;
    - `sae`: `features` and `activations` `[n, top_k]`, where features are -1 if fewer
      than `top_k` are active; or `activations` `[n, features]` of the requested ones;
    - `norm`: `norm` and `cosine` `[n, taps]`;
    - `attention`: `weights` and `keys` (positions; -1 if there are fewer keys)
      `[n, taps, heads, top_k]`, or `weights` of the requested keys; of a full pattern
      `weights` `[heads, n, context]`, where the context ends with the last token;
    - `attribution`: `logits` `[n, taps, tokens]`; the taps are components, such as
      `(3, "attn_add")`;
    - `custom`: `values` `[n, ...]`.

    Token ids, features and keys are int32, other values float32; rows have the model's
    dtype, or float32 if it is bfloat16 or if they are reduced. Log-probabilities are
    natural.
    """

    kind: str
    positions: list[int] = field(default_factory=list)
    """Token positions of the arrays, ascending."""
    taps: tuple[Tap, ...] = ()
    """`(layer, hook point)`, in the order of the arrays."""
    arrays: dict[str, Array] = field(default_factory=dict)
    error: str | None = None
    """Why the result is missing or incomplete; None if it is complete."""
    num_prompt_tokens: int | None = None
    """In the outputs of a stream: position p is that of generated token
    `p - num_prompt_tokens`. A token is computed after the output that brings it, so its
    values come with the next one."""
    note: str | None = None
    """Set if the request itself changes the stream at a place that is read here: the
    values are those before the change."""

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def _repr_html_(self) -> str | None:
        """For notebooks, as a client shows it; None without `clearbox-client`."""
        try:
            return self.for_client()._repr_html_()
        except ImportError:
            return None

    def for_client(self) -> "ClientReadout":
        """The same result as a client has it.

        Raises:
            ImportError: `clearbox-client` is not installed.

        """
        from clearbox_client.readouts import Readout as ClientReadout

        taps = list(self.taps)
        return ClientReadout(self.kind, self.positions, taps, self.arrays, self.error)

    def __repr__(self) -> str:
        parts = [
            self.kind,
            f"{len(self.positions)} positions",
            f"{len(self.taps)} taps",
        ]
        parts += [f"{name} {list(one.shape)}" for name, one in self.arrays.items()]
        told = {"error": self.error, "note": self.note}
        parts += [f"{name}={text!r}" for name, text in told.items() if text]
        return f"ReadoutResult({', '.join(parts)})"


class Joined:
    """The parts of one readout of a request, in order of arrival."""

    def __init__(self, readout: Readout) -> None:
        self._readout = readout
        self._parts: list[ReadoutPart] = []
        self._shown = 0

    def add(self, part: ReadoutPart) -> None:
        """Add a step's part; its positions follow those of earlier parts."""
        self._parts.append(part)

    def whole(self, stop: int) -> ReadoutResult:
        """The result for all tokens below position `stop`."""
        return result_of(self._readout, self._parts, stop)

    def news(self, stop: int) -> ReadoutResult | None:
        """The result of parts added since the last call; None if none or if reduced."""
        fresh, self._shown = self._parts[self._shown :], len(self._parts)
        if not fresh or self._readout.reduce != "none":
            return None
        return result_of(self._readout, fresh, stop)


def result_of(
    readout: Readout, parts: Sequence[ReadoutPart], stop: int
) -> ReadoutResult:
    """Join parts in ascending order into one result for tokens below `stop`.

    Never fails: parts that cannot be joined are an error of this result.
    """
    try:
        return _joined(readout, parts, stop)
    except Exception as error:
        logger.exception("The readout %r could not be joined", readout.name)
        why = f"its results cannot be joined: {described(error)}"
        return ReadoutResult(readout.kind, taps=readout.taps, error=why)


def _joined(readout: Readout, parts: Sequence[ReadoutPart], stop: int) -> ReadoutResult:
    if readout.full:  # Their tokens are on another axis.
        for part in parts:
            part.unpack()
    else:
        parts = _unpacked(parts)
    result = ReadoutResult(readout.kind, taps=readout.taps)
    kept = [_cut(part, stop) for part in parts if part.start < stop]
    errors = sorted({part.error for part in kept if part.error})
    good = [part for part in kept if part.arrays]
    for part in good:
        result.positions += range(part.start, part.start + part.count)
    if readout.reduce != "none":
        if good:
            result.arrays["rows"] = _reduced(readout.reduce, good)
    else:
        for name in good[0].arrays if good else ():
            arrays = [one.arrays[name] for one in good]
            if readout.full:
                whole = _concatenated([one.swapaxes(0, 1) for one in arrays], axis=1)
                arrays = [whole[..., : result.positions[-1] + 1]]
            result.arrays[name] = np.concatenate(arrays)
    if len(errors) > MOST_ERRORS:
        errors[MOST_ERRORS:] = [f"and {len(errors) - MOST_ERRORS} more"]
    result.error = "; ".join(errors) or None
    return result


def _unpacked(parts: Iterable[ReadoutPart]) -> list[ReadoutPart]:
    """The parts with their arrays; consecutive single tokens are one part.

    A request has one of these for each token that it generates, and an array for each
    would take 5 us.
    """
    found: list[ReadoutPart] = []
    for (_, forms), alike in groupby(enumerate(parts), _run_of):
        own = [part for _, part in alike]
        if not forms:
            own[0].unpack()
            found += own
            continue
        arrays = {
            name: np.frombuffer(
                b"".join([one.packed[name][2] for one in own]), dtype
            ).reshape(len(own), *shape[1:])
            for name, dtype, shape in forms
        }
        found.append(ReadoutPart(own[0].name, own[0].start, len(own), arrays))
    return found


def _run_of(
    numbered: tuple[int, ReadoutPart],
) -> tuple[int, tuple[tuple[str, str, tuple[int, ...]], ...]]:
    """What consecutive packed parts of single tokens have in common.

    Returns:
        A number, and the name, dtype and shape of each array; none of any other part,
        which has the number for itself.

    """
    number, part = numbered
    if part.count != 1 or part.arrays or part.reduced or part.error:
        return number, ()
    forms = [(name, dtype, shape) for name, (dtype, shape, _) in part.packed.items()]
    return part.start - number, tuple(forms)


def _concatenated(arrays: Sequence[Array], axis: int = 0) -> Array:
    """The arrays, one after the other; missing keys of full patterns have weight 0."""
    context = arrays[-1].shape[-1]
    if any(one.shape[-1] != context for one in arrays):
        most = max(one.shape[-1] for one in arrays)
        sides = [(0, 0)] * (arrays[0].ndim - 1)
        arrays = [np.pad(a, [*sides, (0, most - a.shape[-1])]) for a in arrays]
    return np.concatenate(arrays, axis)


def _cut(part: ReadoutPart, stop: int) -> ReadoutPart:
    count = min(part.count, stop - part.start)
    if count == part.count or part.reduced:
        return part
    own = {name: one[:count] for name, one in part.arrays.items()}
    return ReadoutPart(part.name, part.start, count, own, error=part.error)


def _reduced(how: str, parts: Sequence[ReadoutPart]) -> Array:
    """Reduce parts, already reduced or not, to `[taps, hidden_size]` float32."""
    if how == "last":
        last = parts[-1]
        rows = last.arrays["rows"]
        return np.asarray(rows if last.reduced else rows[-1], dtype=np.float32)
    values = [_one(how, part) for part in parts]
    if how == "max":
        return reduce(np.maximum, values)
    total = reduce(np.add, values)  # `np.sum` would copy all of them first.
    return total / sum(part.count for part in parts) if how == "mean" else total


def _one(how: str, part: ReadoutPart) -> Array:
    rows = part.arrays["rows"].astype(np.float32)
    if part.reduced:
        return rows
    return rows.max(axis=0) if how == "max" else rows.sum(axis=0)


def merge_results(
    first: Mapping[str, ReadoutResult] | None,
    second: Mapping[str, ReadoutResult] | None,
    second_is_whole: bool,
) -> dict[str, ReadoutResult] | None:
    """Merge the results of two consecutive outputs of a stream.

    Args:
        first: results of the earlier output.
        second: results of the later output.
        second_is_whole: whether the later one is the last, which has all results.

    """
    if second_is_whole or not first or not second:
        found = second or (None if second_is_whole else first)
        return None if found is None else dict(found)
    merged = dict(first)
    for name, result in second.items():
        merged[name] = _followed(first[name], result) if name in first else result
    return merged


def _followed(first: ReadoutResult, second: ReadoutResult) -> ReadoutResult:
    is_full = first.kind == "attention" and first["weights"].ndim == FULL_AXES
    arrays = {
        name: _concatenated([first.arrays[name], one], axis=int(is_full))
        if name in first.arrays
        else one
        for name, one in second.arrays.items()
    }
    return ReadoutResult(
        first.kind,
        first.positions + second.positions,
        first.taps,
        {**first.arrays, **arrays},
        second.error or first.error,
        second.num_prompt_tokens,
        second.note,
    )
