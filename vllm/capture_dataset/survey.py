# SPDX-License-Identifier: Apache-2.0
"""Checks a whole source, and yields its prompts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vllm.capture_dataset.sources import PROMPT_COLUMNS, digest, records
from vllm.capture_dataset.spec import SourceSpec
from vllm.v1.capture.errors import fail

RESERVED = {
    *("sample", "prompt_id", "layer", "hook", "position", "is_prompt", "token_id"),
    *("token", "text_offset", "values"),
}
"""Names of the table's own columns, which carried ones must not have."""

_TYPED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt of the source."""

    sample: int
    """Number in the source, from 0."""
    prompt_id: str
    prompt: str | list[Any]
    """A text, a list of chat messages, or a list of token ids."""
    carried: tuple[Any, ...]
    where: str


@dataclass(slots=True)
class Survey:
    """The facts about a source, after one pass over it."""

    spec: SourceSpec
    column: str = ""
    num_entries: int = 0
    """Number of prompts that are used."""
    carried: dict[str, pa.DataType] = field(default_factory=dict)
    digest: str = ""
    longest_bytes: int = 0
    """Bytes of the longest text prompt; at least its number of tokens, except for
    chats."""
    has_chats: bool = False
    largest_id: tuple[int, str] = (0, "")
    """The largest token id of prompts that are ids, and its place."""
    _superseded: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, spec: SourceSpec) -> "Survey":
        """Check a source.

        Raises:
            CaptureValidationError: the source is invalid; the message names the line
                and the remedy.

        """
        found = cls(spec)
        seen: dict[str, int] = {}
        pending: list[tuple[Any, ...]] = []
        for entry in found._entries():
            found._take_id(entry, seen)
            found._measure(entry.prompt, entry.where)
            pending.append(entry.carried)
            if len(pending) == _TYPED_AT_ONCE:
                found._take_types(pending, entry.where)
                pending = []
            found.num_entries += 1
        found._take_types(pending, "the last rows")
        if not found.num_entries:
            raise _bad(spec, "it has no prompts", None)
        found.num_entries -= len(found._superseded)
        found.digest = digest(spec.path, spec.split)
        return found

    def entries(self, first_sample: int = 0) -> Iterator[Entry]:
        """Yield the prompts that are used, from a number on."""
        for entry in self._entries():
            if entry.sample >= first_sample and entry.sample not in self._superseded:
                yield entry

    def _entries(self) -> Iterator[Entry]:
        spec = self.spec
        for sample, (where, values) in enumerate(records(spec.path, spec.split)):
            if spec.limit is not None and sample >= spec.limit:
                return
            self.column = self.column or _column(spec, values, where)
            named = (self.column, *spec.carry, *filter(None, [spec.id_column]))
            missing = next((name for name in named if name not in values), None)
            if missing is not None:
                raise _bad(
                    spec,
                    f"{where} has no column {missing!r}; it has {sorted(values)}. "
                    "Name one of these with --column, --id or --carry, or correct "
                    "the source",
                    missing,
                )
            prompt_id = sample if spec.id_column is None else values[spec.id_column]
            carried = tuple(values[name] for name in spec.carry)
            prompt = _prompt(spec, values[self.column], where)
            yield Entry(sample, str(prompt_id), prompt, carried, where)

    def _take_id(self, entry: Entry, seen: dict[str, int]) -> None:
        earlier = seen.get(entry.prompt_id)
        if earlier is not None:
            if not self.spec.replace_repeated:
                raise _bad(
                    self.spec,
                    f"{entry.where} repeats the id {entry.prompt_id!r} of prompt "
                    f"{earlier}; make ids unique, omit --id, or use "
                    "--on-repeated-id replace, which keeps the last",
                    entry.prompt_id,
                )
            self._superseded.add(earlier)
        seen[entry.prompt_id] = entry.sample

    def _measure(self, prompt: str | list[Any], where: str) -> None:
        if isinstance(prompt, str) and not self.spec.chat:
            self.longest_bytes = max(self.longest_bytes, len(prompt.encode()))
        elif not isinstance(prompt, str) and isinstance(prompt[0], int):
            self.longest_bytes = max(self.longest_bytes, len(prompt))
            self.largest_id = max(self.largest_id, (max(prompt), where))
        else:
            self.has_chats = True

    def _take_types(self, rows: list[tuple[Any, ...]], where: str) -> None:
        for index, name in enumerate(self.spec.carry):
            values = [row[index] for row in rows]
            known = self.carried.get(name, pa.null())
            try:
                kind = _united(known, pa.array(values).type) if values else known
            except (pa.ArrowException, OverflowError) as error:
                raise _bad(
                    self.spec,
                    f"values of the carried column {name!r} up to {where} have "
                    f"no common type ({error}); use one kind, or leave it out",
                    name,
                ) from None
            self.carried[name] = kind


def _united(known: pa.DataType, new: pa.DataType) -> pa.DataType:
    fields = [pa.schema([pa.field("x", kind)]) for kind in (known, new)]
    merged = pa.unify_schemas(fields, promote_options="permissive")
    return merged.field("x").type


def _column(spec: SourceSpec, values: Mapping[str, Any], where: str) -> str:
    reserved = RESERVED.intersection(spec.carry)
    if reserved:
        message = f"the carried column {min(reserved)!r} has the name of a table column"
        raise _bad(spec, f"{message}; rename it", min(reserved))
    if spec.column is not None:
        return spec.column
    found = next((name for name in PROMPT_COLUMNS if name in values), None)
    if found is None:
        raise _bad(
            spec,
            f"{where} has the columns {sorted(values)}, none of which is among "
            f"{list(PROMPT_COLUMNS)}; name one with --column",
            None,
        )
    return found


def _prompt(spec: SourceSpec, raw: Any, where: str) -> str | list[Any]:
    good = isinstance(raw, str) or (
        isinstance(raw, list)
        and (
            (set(map(type, raw)) <= {int} and min(raw, default=0) >= 0)  # Not bool.
            or all(isinstance(part, dict) and "role" in part for part in raw)
        )
    )
    if good and raw:
        prompt: str | list[Any] = raw
        return prompt
    raise _bad(
        spec,
        f"{where}: a prompt must be a text, a list of chat messages or a list of "
        "token ids, and not be empty",
        raw,
    )


def _bad(spec: SourceSpec, what: str, value: Any) -> Exception:
    return fail(f"source: {str(spec.path)!r}: {what}", "source", value)
