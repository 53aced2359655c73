# SPDX-License-Identifier: Apache-2.0
"""Labelled texts, and which of them are held out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.steering.pairs import SIDES, Prompt, check_one_kind, prompt_of
from vllm.v1.readouts.errors import fail
from vllm.v1.residual.bounds import listed, shown

Labels: TypeAlias = npt.NDArray[np.bool_]

_WORDS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a file of labelled texts; others are ignored."""

    texts: Sequence[str]
    """The first of these that a record has holds the text, or the chat messages."""
    label: str = "label"
    positive: str | None = None
    """The label of positive texts; None if labels are true and false, or 1 and 0."""
    group: str | None = None
    """Texts with an equal value are held out together."""


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """Texts with their labels."""

    texts: list[Prompt]
    labels: Labels  # [texts]
    groups: list[str] | None
    """What belongs together, by text; the two texts of a pair do."""


def read_labelled(
    records: Iterable[tuple[str, Any]],
    path: str | Path,
    columns: Columns,
    least: int = 4,
) -> Labelled:
    """Read texts and labels, or pairs `{"positive": ..., "negative": ...}`.

    Args:
        records: the file's records, each with its place, such as `line 3`.
        path: the file, for messages.
        columns: where texts, labels and groups are.
        least: least texts of each class.

    Raises:
        ReadoutValidationError: a record is invalid, or a class has too few texts.
        SteeringValidationError: a text is invalid.

    """
    texts: list[Prompt] = []
    labels: list[bool] = []
    groups: list[str] = []
    for number, (where, record) in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise _bad(path, where, "is not an object", record)
        if record.keys() >= set(SIDES) and columns.label not in record:
            texts += [prompt_of(record[side], path, number) for side in SIDES]
            labels += [True, False]
            groups += [str(record.get(columns.group, number))] * 2
            continue
        column = next((name for name in columns.texts if name in record), None)
        named = [columns.label] + [columns.group] * (columns.group is not None)
        missing = [name for name in named if name not in record]
        if column is None or missing:
            lacking = "none of " + listed(columns.texts) if column is None else missing
            raise _bad(path, where, f"has {listed(record)}, and not {lacking}", record)
        texts.append(prompt_of(record[column], path, number))
        labels.append(_label(record[columns.label], columns, path, where))
        groups.append(str(record.get(columns.group)))
    check_one_kind(texts, path)
    found = np.array(labels, dtype=bool)
    if min(found.sum(), (~found).sum()) < least:
        raise fail(
            f"data: {str(path)!r} has {int(found.sum())} positive and "
            f"{int((~found).sum())} negative texts; it needs {least} of each",
            "data",
            str(path),
        )
    is_grouped = columns.group is not None or len(set(groups)) > 1
    return Labelled(texts, found, groups if is_grouped else None)


def _label(raw: Any, columns: Columns, path: str | Path, where: str) -> bool:
    if columns.positive is not None:
        return str(raw) == columns.positive
    value = _WORDS.get(raw.lower(), raw) if isinstance(raw, str) else raw
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise _bad(
        path,
        where,
        f"has the {columns.label} {shown(raw)}; labels are true and false or 1 and 0, "
        "or name that of the positive texts with --positive",
        raw,
    )


def _bad(path: str | Path, where: str, what: str, value: Any) -> Exception:
    return fail(f"data: {where} of {str(path)!r} {what}", "data", value)


def held_out(data: Labelled, share: float, seed: int) -> Labels:
    """Choose held-out texts at random: whole groups, or a share of each class.

    Args:
        data: the texts.
        share: fraction to hold out; at least one text per class is held out and at
            least one is kept.
        seed: random seed.

    Returns:
        `[texts]`, true for held-out texts.

    Raises:
        ReadoutValidationError: a class would be in one part only.

    """
    draw = np.random.default_rng(seed)
    labels = data.labels
    if data.groups is not None:
        return _held_groups(data, share, draw)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in (True, False):
        own = draw.permutation(np.flatnonzero(labels == label))
        count = min(max(round(share * len(own)), 1), len(own) - 1)
        chosen[own[:count]] = True
    return chosen


def _held_groups(data: Labelled, share: float, draw: np.random.Generator) -> Labels:
    groups = np.array(data.groups)
    chosen = np.zeros(len(groups), dtype=bool)
    for group in draw.permutation(np.unique(groups)):
        if chosen.sum() >= max(share * len(groups), 1):
            break
        chosen |= groups == group
    parts = (data.labels[chosen], data.labels[~chosen])
    if not all(part.any() and not part.all() for part in parts):
        raise fail(
            "group: with these groups one part would have texts of one class only; "
            "use another --seed or --held-out, or more groups",
            "group",
            len(np.unique(groups)),
        )
    return chosen
