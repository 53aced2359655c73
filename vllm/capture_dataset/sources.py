# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from JSON Lines, CSV, Parquet, text, and Hugging Face data sets.

A source is read twice, record by record: first to check all of it, then to use it. So a
source of any size takes little memory, and errors are reported before a model is
loaded.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vllm.v1.capture.errors import fail

PROMPT_COLUMNS = ("prompt", "text", "messages", "conversations")
"""The columns that may hold prompts if no column is named, in order of preference."""

Record = tuple[str, Mapping[str, Any]]
"""The record's place, such as `line 7`, and its columns."""

Kind: TypeAlias = type[int] | type[float] | type[str] | None
"""What the fields of a CSV column are; None if all are empty."""

_SURROGATE = re.compile("[\ud800-\udfff]")

# Other digits are names, such as 007, or would lose some as numbers.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_DECIMAL = re.compile(
    r"-?(0|[1-9][0-9]*)(\.[0-9]+([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|nan|-?inf"
)


def records(path: Path, split: str | None = None) -> Iterator[Record]:
    """Yield the records of a source, in order.

    Raises:
        CaptureValidationError: the source cannot be read; the message names the line.

    """
    if path.is_dir():
        return _hugging_face(path, split)
    reader = _READERS.get(path.suffix.lower())
    if not path.is_file() or reader is None:
        raise fail(
            f"source: {str(path)!r} is "
            + ("no file or folder" if not path.exists() else "of an unknown kind")
            + f"; it must be a file that ends in one of {sorted(_READERS)}, or the "
            "folder of a Hugging Face data set",
            "source",
            str(path),
        )
    return reader(path)


def digest(path: Path, split: str | None = None, pattern: str = "*.arrow") -> str:
    """SHA-256 of a file's content, or of the folder's files of this pattern."""
    found = hashlib.sha256(str(split).encode())
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    for file in filter(Path.is_file, files):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: found)
    return found.hexdigest()


def _json_lines(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        try:
            values = json.loads(line)
        except ValueError as error:
            message = f"line {number} is not JSON: {error}; correct or remove it"
            raise _bad(path, message, line) from None
        if isinstance(values, str):
            values = {"text": values}
        if not isinstance(values, dict):
            message = f"line {number} is neither an object nor a text"
            raise _bad(path, f'{message}; write {{"prompt": ...}} or "..."', line)
        if "\\ud" in line.lower():  # Or a character that is written as a pair.
            half = _SURROGATE.search(json.dumps(values, ensure_ascii=False))
            if half is not None:
                message = f"line {number} has {half[0]!a}, half of a character"
                raise _bad(path, f"{message}; remove it", line)
        yield f"line {number}", values


def _text(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        yield f"line {number}", {"text": line}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield nonblank lines with their numbers."""
    with path.open("rb") as opened:
        for number, raw in enumerate(opened, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"line {number} is not UTF-8: {error}; convert the file"
                raise _bad(path, message, raw[:60]) from None
            if line.strip():
                yield number, line.rstrip("\r\n")


def _separated(path: Path) -> Iterator[Record]:
    """Yield rows; a column whose fields are all numbers, or empty, has numbers."""
    kinds: dict[str, Kind] = {}
    for _, fields in _fields(path):
        for name, text in fields.items():
            kinds[name] = _kind(text, kinds.get(name))
    for where, fields in _fields(path):
        yield where, {name: _field(fields[name], kinds[name]) for name in fields}


def _fields(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows as texts."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # Line ends within quotes belong to a field, so the csv module must read the file.
    with path.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            twice = [name for name in header if header.count(name) > 1]
            if twice:
                message = f"line 1 names {twice[0]!r} more than once; rename a column"
                raise _bad(path, message, header)
            for values in reader:
                where = f"line {reader.line_num}"
                if not values:
                    continue
                if len(values) != len(header):
                    message = (
                        f"{where} has {len(values)} fields, the first {len(header)}"
                    )
                    raise _bad(path, f"{message}; correct it or quote it", values)
                yield where, dict(zip(header, values))
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"line {reader.line_num + 1} cannot be read: {error}; correct it"
            raise _bad(path, message, None) from None


def _kind(text: str, known: Kind) -> Kind:
    """The kind of a column with one more field."""
    if known is str or not text:
        return known
    if _INTEGER.fullmatch(text):
        return known or int
    return float if _DECIMAL.fullmatch(text) else str


def _field(text: str, kind: Kind) -> str | int | float | None:
    if kind is None or kind is str:
        return text
    return kind(text) if text else None


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as opened:
            number = 0
            for batch in opened.iter_batches(1024):
                for values in batch.to_pylist():
                    yield f"row {number}", values
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise _bad(
            path, f"it cannot be read as Parquet: {error}; write it again", None
        ) from None


def _hugging_face(path: Path, split: str | None) -> Iterator[Record]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError:
        raise fail(
            f"source: {str(path)!r} is a folder, and the package datasets, which reads "
            "data sets from folders, is not installed; pip install datasets",
            "source",
            str(path),
        ) from None
    try:
        found = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        message = f"it contains no data set: {error}; use Dataset.save_to_disk"
        raise _bad(path, message, None) from None
    if isinstance(found, DatasetDict):
        if split not in found:
            message = f"it has the splits {sorted(found)}; choose one with --split"
            raise _bad(path, message, split)
        found = found[split]
    for number, values in enumerate(found):
        yield f"row {number}", values


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _parquet,
    ".txt": _text,
}


def _bad(path: Path, what: str, value: Any) -> Exception:
    return fail(f"source: {str(path)!r}: {what}", "source", value)
