# SPDX-License-Identifier: Apache-2.0
"""Positions of entries; matrices with one row per position."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import structs

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.selectors import MAX_POSITIONS, as_list
from vllm.v1.residual.selectors import parse_positions as parse_selector
from vllm.v1.residual.spans import NAMED, Spans, spans_of
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import (
    Operation,
    PackedVectors,
    SteeringTiers,
    hashed,
    in_order,
)

ROW_OPS = ("replace", "add", "project_out", "clamp")
"""Operations that may have a vector for each position."""
WHOLE_PROMPT = NAMED["all_prompt"]
ALL_GENERATED = "all_generated"
"""The selector of all generated tokens; its entries move to the decode tier."""

Places = npt.NDArray[np.int64]
Rows: TypeAlias = Sequence[tuple[Spans, npt.NDArray[np.intp]]]
"""Positions, with the indices of their rows in a matrix."""


def parse_positions(raw: Any, at: str) -> Spans | None:
    """Parse the positions of an entry; None for every token of its tier.

    Args:
        raw: a selector of `vllm.v1.residual.selectors`.
        at: the selector's name in messages.

    Raises:
        SteeringValidationError: it is not a selector, or selects tokens that are only
            known after they are computed.

    """
    found = parse_selector(raw, at, fail)
    if not isinstance(found, str):
        return found
    if found == "last_generated":
        raise fail(
            f"{at}: the last generated token is not known in advance; give "
            "its position, or capture it instead",
            at,
            raw,
        )
    if found == ALL_GENERATED:
        raise fail(
            f"{at}: the number of generated tokens is not known in advance; list the "
            "positions of the rows",
            at,
            raw,
        )
    return NAMED[found]


def row_positions(raw: Any, num_rows: int, at: str) -> Rows:
    """The positions of a matrix's rows.

    Args:
        raw: a selector of as many positions as there are rows: a list in the order of
            the rows, or a selector of ascending positions.
        num_rows: number of rows of the matrix.
        at: the parameter's name in messages.

    Returns:
        Positions counted from the prompt's end, then those counted from its start, each
        with the indices of their rows, ascending. `"all_prompt"` is resolved when the
        prompt is known.

    Raises:
        SteeringValidationError: the selector is invalid, or selects another number of
            positions.

    """
    raw = as_list(raw)
    everything = np.arange(num_rows)
    if num_rows > MAX_POSITIONS:
        raise fail(f"{at}: at most {MAX_POSITIONS} positions", at, num_rows)
    spans = None if raw is None else parse_positions(raw, at)
    if spans is None:
        raise fail(
            f"{at}: vectors needs positions, one for each of its {num_rows} rows: a "
            'list, {"last": k}, {"ranges": [[first, last], ...]}, or "all_prompt" for '
            "a row for each token of the prompt",
            at,
            raw,
        )
    if spans == WHOLE_PROMPT:
        return [(spans, everything)]
    count = len(raw) if isinstance(raw, (list, tuple)) else _count(raw, spans)
    if count != num_rows:
        raise fail(
            f"{at}: {count} positions for {num_rows} rows of vectors; give one "
            "position for each row",
            at,
            count,
        )
    places = _listed(raw, spans)
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    if (np.diff(ascending) == 0).any():
        twice = ascending[:-1][np.diff(ascending) == 0][0]
        raise fail(
            f"{at}: position {twice} is given twice; give each row its own position",
            at,
            int(twice),
        )
    start = int(np.searchsorted(ascending, 0))
    halves = ((ascending[:start], order[:start]), (ascending[start:], order[start:]))
    return [(spans_of(half), rows) for half, rows in halves if len(half)]


def _count(raw: Any, spans: Spans) -> int:
    """The number of positions of an object or name, with repetitions counted."""
    pairs = raw.get("ranges") if isinstance(raw, Mapping) else None
    if pairs is None:
        return sum(stop - first for first, stop in spans)
    return sum(int(last) - int(first) + 1 for first, last in pairs)


def _listed(raw: Any, spans: Spans) -> Places:
    """The positions in the order of the rows."""
    if isinstance(raw, (list, tuple)):
        return np.array(raw, dtype=np.int64)
    pairs = raw.get("ranges") if isinstance(raw, Mapping) else None
    if pairs is not None:
        spans = tuple((int(first), int(last) + 1) for first, last in pairs)
    return np.concatenate([np.arange(first, stop) for first, stop in spans])


def for_prompt(tiers: SteeringTiers, num_prompt: int, parameter: str) -> SteeringTiers:
    """Resolve matrices with a row for each prompt token to positions.

    Args:
        tiers: the request's tiers.
        num_prompt: number of prompt tokens.
        parameter: the parameter's name in messages.

    Raises:
        SteeringValidationError: a matrix has another number of rows than the prompt has
            tokens.

    """
    if not any(map(_is_whole, tiers.operations)):
        return tiers

    def resolved(part: PackedVectors) -> PackedVectors:
        made = tuple(_at_prompt(one, num_prompt, parameter) for one in part.operations)
        return structs.replace(part, operations=made)

    return tiers.changed(resolved)


def _is_whole(one: Operation) -> bool:
    return bool(one.num_rows) and one.positions == WHOLE_PROMPT


def _at_prompt(one: Operation, num_prompt: int, parameter: str) -> Operation:
    if not _is_whole(one):
        return one
    if one.num_rows != num_prompt:
        raise fail(
            f'{parameter}: at "all_prompt" vectors has a row for each token of the '
            f"prompt: {one.hook} of layer {one.layer} has {one.num_rows} rows, and "
            f"the prompt {num_prompt} tokens; give as many rows, or list positions",
            parameter,
            one.num_rows,
        )
    return without_zeros(structs.replace(one, positions=((0, num_prompt),)))


def without_zeros(one: Operation) -> Operation:
    """The operation without rows that add nothing, whose tokens must keep every bit."""
    if one.op != "add" or not one.num_rows or one.positions == WHOLE_PROMPT:
        return one
    rows = one.vector.reshape(one.num_rows, -1)
    acts = rows.any(axis=1)
    if acts.all():
        return one
    assert one.positions is not None
    places = _listed(None, one.positions)
    kept = structs.replace(
        one,
        data=rows[acts].tobytes(),
        positions=spans_of(places[acts].tolist()),
        num_rows=int(acts.sum()),
    )
    return hashed(kept)


def check_no_whole_prompt(tiers: SteeringTiers) -> None:
    """Refuse what only a request can have because it concerns its whole prompt.

    These are matrices with a row per prompt token, because prompts differ, and means
    over the prompt and decisions that hold from a prompt token on, because other
    requests may read cached blocks.

    Raises:
        SteeringValidationError: naming the parameter and the remedy.

    """
    for condition in tiers.conditions:
        if condition.needs_prompt:
            mean = condition.mean
            what = "on the mean over" if mean else "that may fire in"
            raise fail(
                f"vectors: a condition {what} the prompt needs all of its tokens, "
                "which are not computed if they are cached; give it in requests, or by "
                "a module's name, or "
                + ('leave out "reduce"' if mean else "in decode_vectors"),
                "vectors",
                "mean" if mean else condition.scope,
            )
    for one in filter(_is_whole, tiers.operations):
        raise fail(
            f"vectors.{one.hook}.{one.layer}.positions: prompts have different "
            f'numbers of tokens, so {one.num_rows} rows for "all_prompt" fit few of '
            "them; list the positions",
            "vectors",
            shown("all_prompt"),
        )


def joined_rows(operations: Iterable[Operation]) -> list[Operation]:
    """Merge operations that differ only in position and vector into matrices.

    Adjacent entries at single positions, as written to replace a prompt token by token,
    become one matrix, whose cost depends on its size only.
    """
    found: list[Operation] = []
    for _, alike in groupby(in_order(operations), key=_kind):
        found += _joined_runs(list(alike))
    return found


def _kind(one: Operation) -> object:
    """A key that is equal for operations that one matrix can hold."""
    if one.op not in ROW_OPS or not _is_single(one):
        return id(one)
    assert one.positions is not None
    alike = structs.replace(one, data=b"", content="", positions=None)
    return alike, one.positions[0][0] < 0


def _is_single(one: Operation) -> bool:
    spans = one.positions
    if one.num_rows or spans is None or len(spans) != 1:
        return False
    return spans[0][1] - spans[0][0] == 1


def _joined_runs(alike: Sequence[Operation]) -> Iterator[Operation]:
    """Merge each run of operations of one kind at distinct positions."""
    run: dict[int, Operation] = {}
    for one in alike:
        position = one.positions[0][0] if one.positions else 0
        if position in run:
            yield _joined(run)
            run = {}
        run[position] = one
    yield _joined(run)


def _joined(run: dict[int, Operation]) -> Operation:
    if len(run) == 1:
        return next(iter(run.values()))
    rows = [run[position] for position in sorted(run)]
    contents = " ".join(one.content for one in rows)
    return structs.replace(
        rows[0],
        data=b"".join(one.data for one in rows),
        content=hashlib.sha256(f"rows {contents}".encode()).hexdigest(),
        positions=spans_of(run),
        num_rows=len(rows),
    )
