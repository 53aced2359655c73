# SPDX-License-Identifier: Apache-2.0
"""Reads files of contrasting texts and of prompts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vllm.v1.steering.errors import SteeringValidationError, fail

Prompt: TypeAlias = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""

SIDES = ("positive", "negative")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two prompts that differ in the property that the vector should represent."""

    positive: Prompt
    negative: Prompt


def read_pairs(path: str | Path) -> list[Pair]:
    """Read the pairs of a JSON Lines file, or of a JSON file with a list.

    Each entry is `{"positive": ..., "negative": ...}`. A side is a text or a list of
    chat messages `{"role", "content"}`; all sides of a file must be of the same kind.

    Raises:
        SteeringValidationError: naming the file, the entry and what is wrong with it.

    """
    pairs = []
    for number, entry in enumerate(entries_of(path), start=1):
        if not isinstance(entry, Mapping) or set(entry) != set(SIDES):
            keys = sorted(map(str, entry)) if isinstance(entry, Mapping) else entry
            raise _bad(path, number, 'must be {"positive": ..., "negative": ...}', keys)
        pairs.append(Pair(*(prompt_of(entry[side], path, number) for side in SIDES)))
    sides = [side for pair in pairs for side in (pair.positive, pair.negative)]
    check_one_kind(sides, path)
    return pairs


def check_one_kind(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Refuse a file that has both texts and chats.

    Raises:
        SteeringValidationError: naming the file.

    """
    if len({type(one) for one in prompts}) > 1:
        raise fail(
            f"path: {str(path)!r} mixes texts and chats; use one kind",
            "path",
            str(path),
        )


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts: JSON Lines, a JSON list, or in other files one text per line.

    Raises:
        SteeringValidationError: naming the file, the entry and what is wrong with it.

    """
    if Path(path).suffix in (".json", ".jsonl"):
        entries = entries_of(path)
        return [prompt_of(entry, path, i) for i, entry in enumerate(entries, start=1)]
    lines = [line for _, line in _lines(path)]
    if not lines:
        raise fail(f"prompts: {str(path)!r} is empty", "prompts", str(path))
    return list(lines)


def entries_of(path: str | Path) -> list[Any]:
    """The entries of a JSON Lines file, or of a JSON file with a list.

    Raises:
        SteeringValidationError: the file cannot be read, or has no entries.

    """
    text = _text(path)
    is_list = text.lstrip().startswith("[") and Path(path).suffix != ".jsonl"
    parts = [(1, text)] if is_list else _lines(path)
    entries: list[Any] = []
    for number, part in parts:
        try:
            entries.append(json.loads(part))
        except ValueError as error:
            where = "" if is_list else f"line {number} of "
            raise fail(
                f"path: {where}{str(path)!r} is not JSON: {error}; correct it",
                "path",
                str(path),
            ) from None
    entries = entries[0] if is_list else entries
    if not entries:
        raise fail(f"path: {str(path)!r} has no entries", "path", str(path))
    return list(entries)


def _lines(path: str | Path) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers; only line feeds end them."""
    lines = enumerate(_text(path).split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise fail(
            f"path: {str(path)!r} cannot be read: {error}", "path", str(path)
        ) from None


def prompt_of(raw: Any, path: str | Path, number: int) -> Prompt:
    """The text or chat of entry `number` of a file.

    Raises:
        SteeringValidationError: it is neither; names the file and the entry.

    """
    is_chat = isinstance(raw, list) and all(map(_is_message, raw))
    if raw and (is_chat or isinstance(raw, str)):
        prompt: Prompt = raw
        return prompt
    raise _bad(path, number, "must be a text or a list of chat messages", raw)


def _is_message(raw: Any) -> bool:
    return isinstance(raw, dict) and {"role", "content"} <= raw.keys()


def _bad(
    path: str | Path, number: int, what: str, value: Any
) -> SteeringValidationError:
    return fail(f"path: entry {number} of {str(path)!r} {what}", "path", value)
