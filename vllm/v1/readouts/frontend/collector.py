# SPDX-License-Identifier: Apache-2.0
"""Collects a request's readout results in the output processor."""

from collections.abc import Iterator, Sequence, Set
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from vllm.logger import init_logger
from vllm.v1.readouts.core.scheduler import STOP_PREFIX
from vllm.v1.readouts.firing import kept_spans
from vllm.v1.readouts.results import ReadoutResult, concatenated
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import (
    NEVER_AFTER,
    Array,
    Readout,
    ReadoutPart,
    ReadoutPlan,
    ReadoutRows,
    StopWhen,
    is_by_token,
    unpacked,
)
from vllm.v1.residual.spans import Spans, overlap
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

MOST_ERRORS = 4
"""Most different errors that a result names."""


class Collector:
    """Joins the parts that arrive with the outputs of one sample."""

    def __init__(
        self, plan: ReadoutPlan, num_prompt_tokens: int, changed: Set[Tap] = frozenset()
    ) -> None:
        """Join the results of a plan's readouts.

        Args:
            plan: the readouts.
            num_prompt_tokens: of the request.
            changed: the places where the request itself changes the stream.

        """
        self._joined = {
            one.name: Joined(one, _note_changed(one, changed))
            for one in plan.readouts
            if not one.step
        }
        self._num_prompt_tokens = num_prompt_tokens
        self._stop_when = plan.stop_when
        self._keep_when = plan.keep_when
        self._taken = {name for reader in plan.readers for name in reader.names}
        """The readouts whose results consumers take."""
        self._last: dict[str, ReadoutResult] | None = None
        """The results of the last output, if it was made."""

    def add(self, part: ReadoutPart) -> None:
        """Add a part that came with an output."""
        self._joined[part.name].add(part)

    def results(
        self, fed: int, delta: bool, finished: bool
    ) -> dict[str, ReadoutResult]:
        """The results for one output, by name of the readout.

        Args:
            fed: generated tokens so far that have a row, without dropped ones.
            delta: whether outputs before the last contain only what is new.
            finished: whether this is the last output, which contains everything.

        """
        stop = self._num_prompt_tokens + fed
        if not delta or finished:
            whole = {name: one.whole(stop) for name, one in self._joined.items()}
            if finished:
                for name, result in whole.items():
                    _note_missing(self._joined[name].readout, result, stop)
                for rule in self._stop_when:
                    _note_unread(rule, whole[rule.readout])
                self._last = whole
            return self._placed(whole) if delta else whole
        news = {name: one.news(stop) for name, one in self._joined.items()}
        return self._placed(
            {name: one for name, one in news.items() if one is not None}
        )

    def _placed(self, results: dict[str, ReadoutResult]) -> dict[str, ReadoutResult]:
        """Say of the results in a stream to which tokens their positions belong."""
        for result in results.values():
            result.num_prompt_tokens = self._num_prompt_tokens
        return results

    def rows(self, num_tokens: int) -> list[ReadoutRows]:
        """The results that consumers take, once the request has ended.

        Args:
            num_tokens: generated tokens that the client has; needed if there was no
                last output, because the request was aborted.

        """
        if not self._taken:
            return []
        return [
            rows
            for name in sorted(self._taken)
            for rows in rows_of(
                self._joined[name].readout, self._whole(name, num_tokens)
            )
        ]

    def kept(self, num_tokens: int) -> dict[str, Spans]:
        """The positions whose rows are kept, by consumer with `keep_when`.

        Args:
            num_tokens: as of `rows`.

        """
        return {
            keep.instance: kept_spans(
                keep,
                self._joined[keep.rule.readout].readout,
                self._whole(keep.rule.readout, num_tokens),
            )
            for keep in self._keep_when
        }

    def _whole(self, name: str, num_tokens: int) -> ReadoutResult:
        if self._last is not None:
            return self._last[name]
        stop = self._num_prompt_tokens + max(num_tokens - 1, 0)
        return self._joined[name].whole(stop)


def _note_changed(readout: Readout, changed: Set[Tap]) -> str | None:
    read = readout.staged if readout.kind == "attribution" else readout.taps
    places = [tap for tap in read if tap in changed and readout.after == -1]
    if not places and readout.kind in ("lens", "attribution"):
        # What enters the head, which `after` does not have either.
        places = [tap for tap in changed if tap[1] == "final_norm"]
    if not places:
        return None
    layer, hook = places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    never = readout.kind in NEVER_AFTER or hook == "final_norm"
    return (
        f"this request changes {hook} of layer {layer}{more}, after it is read: these "
        "values are those before the change"
    ) + ("" if never else '; "after": true reads those behind it')


def _note_missing(readout: Readout, result: ReadoutResult, stop: int) -> None:
    wanted = sum(b - a for a, b in overlap(readout.ranges, 0, stop))
    if len(result.positions) != wanted and result.error is None:
        result.error = f"only {len(result.positions)} of {wanted} tokens were read out"


def _note_unread(rule: StopWhen, result: ReadoutResult) -> None:
    """Report a stop condition on a value that a custom readout does not return."""
    values = result.arrays.get("values")
    if result.kind != "custom" or values is None or result.error is not None:
        return
    count = prod(values.shape[1:])
    if rule.index >= count:
        result.error = (
            f"stop_when: it has no value {rule.index} that could end the request; it "
            f"returned {count} for a token, counted from 0"
        )


class Run:
    """Consecutive single tokens whose packed values have one form.

    A request has one of these for each token that it generates; an array for each would
    take 5 us.
    """

    __slots__ = ("_data", "_form", "_name", "_start")

    def __init__(self, first: ReadoutPart) -> None:
        self._name, self._start, self._form = first.name, first.start, first.form
        self._data = [first.data]

    def add(self, part: ReadoutPart) -> bool:
        """Add the next token; False if the part does not continue the run."""
        if part.form != self._form or part.start != self._start + len(self._data):
            return False
        self._data.append(part.data)
        return True

    def part(self) -> ReadoutPart:
        """All tokens as one part, with arrays."""
        count = len(self._data)
        arrays = unpacked(self._form, b"".join(self._data), count)
        return ReadoutPart(self._name, self._start, count, arrays)


class Joined:
    """The parts of one readout of a request, in order of arrival."""

    def __init__(self, readout: Readout, note: str | None = None) -> None:
        self.readout = readout
        self._note = note
        self._parts: list[ReadoutPart | Run] = []
        self._shown = 0
        self._run: Run | None = None
        """The last of the parts, if single tokens may be added to it."""

    def add(self, part: ReadoutPart) -> None:
        """Add a step's part; its positions follow those of earlier parts."""
        is_single = not (part.count > 1 or part.arrays or part.reduced)
        if is_single and self._run is not None and self._run.add(part):
            return
        is_single = is_single and is_by_token(part.form) and not self.readout.full
        self._run = Run(part) if is_single else None
        self._parts.append(self._run or part)

    def whole(self, stop: int) -> ReadoutResult:
        """The result for all tokens below position `stop`."""
        return self._of(self._parts, stop)

    def news(self, stop: int) -> ReadoutResult | None:
        """The result of parts added since the last call; None if none or if reduced."""
        fresh, self._shown = self._parts[self._shown :], len(self._parts)
        self._run = None
        if not fresh or self.readout.reduce != "none":
            return None
        return self._of(fresh, stop)

    def _of(self, parts: Sequence[ReadoutPart | Run], stop: int) -> ReadoutResult:
        result = result_of(self.readout, parts, stop)
        result.note = self._note
        return result


def result_of(
    readout: Readout, parts: Sequence[ReadoutPart | Run], stop: int
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


def _joined(
    readout: Readout, parts: Sequence[ReadoutPart | Run], stop: int
) -> ReadoutResult:
    opened = [one.part() if isinstance(one, Run) else one for one in parts]
    for part in opened:
        part.unpack()
    result = ReadoutResult(readout.kind, taps=readout.taps)
    kept = [_cut(part, stop) for part in opened if part.start < stop]
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
                whole = concatenated([one.swapaxes(0, 1) for one in arrays], axis=1)
                arrays = [whole[..., : result.positions[-1] + 1]]
            result.arrays[name] = np.concatenate(arrays)
    if len(errors) > MOST_ERRORS:
        errors[MOST_ERRORS:] = [f"and {len(errors) - MOST_ERRORS} more"]
    result.error = "; ".join(errors) or None
    return result


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


def collector_for(
    params: "SamplingParams | None", changed: Set[Tap] = frozenset()
) -> Collector | None:
    """A collector for a request that changes these places; None without readouts."""
    plan = params._capture_plan if params is not None else None
    if plan is None or plan.readouts is None:
        return None
    if all(one.step for one in plan.readouts.readouts):
        return None
    return Collector(plan.readouts, plan.num_prompt_tokens, changed)


def ended_by(stop_reason: object) -> bool:
    """Whether a request was ended by a readout."""
    return isinstance(stop_reason, str) and stop_reason.startswith(STOP_PREFIX)


BY_TAP = ("lens", "norm", "rows", "attention", "attribution")
"""Kinds whose arrays have a dimension of taps."""

_STORED = ("float16", "float32", "float64", "int32", "int64")
"""Dtypes that every format of rows can hold."""


def rows_of(readout: Readout, result: ReadoutResult) -> list[ReadoutRows]:
    """A readout's result as rows: one entry per array and tap.

    A custom readout of several taps has one value per token, which is given to the last
    of them. A reduced result is one row.

    Args:
        readout: the readout.
        result: its result for all valid tokens.

    """
    reduced = readout.reduce != "none"
    return [
        ReadoutRows(
            name=readout.name,
            kind=readout.kind,
            array=name,
            tap=tap,
            positions=result.positions,
            dtype=str(values.dtype),
            shape=values.shape[1:],
            data=values.tobytes(),
            reduced=reduced,
            error=result.error or "",
        )
        for name, array in result.arrays.items()
        for tap, values in _by_tap(readout, _storable(array), reduced)
    ]


def _by_tap(
    readout: Readout, array: Array, reduced: bool
) -> Iterator[tuple[Tap, Array]]:
    """The values `[rows, ...]` of each tap."""
    if readout.full:
        yield readout.taps[-1], array.swapaxes(0, 1)
        return
    if readout.kind not in BY_TAP:
        yield readout.taps[-1], array
        return
    for number, tap in enumerate(readout.taps):
        yield tap, array[number : number + 1] if reduced else array[:, number]


def _storable(array: Array) -> Array:
    if str(array.dtype) in _STORED:
        return array
    small = np.can_cast(array.dtype, np.int32)
    whole = array.dtype.kind in "iub"
    return array.astype((np.int32 if small else np.int64) if whole else np.float32)
