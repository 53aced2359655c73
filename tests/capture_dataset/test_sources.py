# SPDX-License-Identifier: Apache-2.0
"""Prompts from every kind of source, and the errors for invalid ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vllm.capture_dataset.spec import SourceSpec
from vllm.capture_dataset.survey import Survey
from vllm.v1.capture.errors import CaptureValidationError

ROWS = [{"text": f"text {i}", "label": i, "share": i / 2} for i in range(5)]


def as_jsonl(folder: Path) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n\n".join(map(json.dumps, ROWS)))
    return path


def as_csv(folder: Path) -> Path:
    path = folder / "in.csv"
    lines = [
        "text,label,share",
        *(f'"{r["text"]}",{r["label"]},{r["share"]}' for r in ROWS),
    ]
    path.write_text("\n".join(lines))
    return path


def as_tsv(folder: Path) -> Path:
    path = folder / "in.tsv"
    path.write_text(as_csv(folder).read_text().replace(",", "\t"))
    return path


def as_parquet(folder: Path) -> Path:
    path = folder / "in.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def as_hugging_face(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(folder / "in")
    return folder / "in"


def survey(path: Path, **chosen: Any) -> Survey:
    return Survey.of(SourceSpec(path=path, **chosen))


@pytest.mark.parametrize(
    "make", [as_jsonl, as_csv, as_tsv, as_parquet, as_hugging_face]
)
def test_every_kind_of_source_has_the_same_prompts(make: Any, tmp_path: Path) -> None:
    found = survey(make(tmp_path), carry=("label", "share"))
    entries = list(found.entries())
    assert found.column == "text" and found.num_entries == 5
    assert [entry.prompt for entry in entries] == [r["text"] for r in ROWS]
    assert [entry.carried for entry in entries] == [
        (r["label"], r["share"]) for r in ROWS
    ]
    assert found.carried == {"label": pa.int64(), "share": pa.float64()}
    assert [entry.sample for entry in found.entries(3)] == [3, 4]


def test_a_csv_column_has_numbers_if_all_of_its_fields_are_numbers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,zip,score,count\n2024,02139,0.50,\nhi,94103,1,7\nyo,1,,3\n")
    found = survey(path, carry=("zip", "score", "count"))
    entries = list(found.entries())
    assert [entry.prompt for entry in entries] == ["2024", "hi", "yo"]
    assert [entry.carried for entry in entries] == [
        ("02139", 0.5, None),
        ("94103", 1.0, 7),
        ("1", None, 3),
    ]
    assert found.carried["zip"] == pa.string()


def test_a_character_written_as_a_pair_of_surrogates_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(r'{"text": "\ud83d\ude00 \\ud83d"}')
    assert [entry.prompt for entry in survey(path).entries()] == ["\U0001f600 \\ud83d"]


def test_a_text_files_lines_are_prompts(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo, three\n")
    found = survey(tmp_path / "in.txt", limit=1)
    assert [entry.prompt for entry in found.entries()] == ["one"]


def test_chats_and_token_ids_are_prompts_too(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    path.write_text("\n".join(map(json.dumps, [{"prompt": chat}, {"prompt": [5, 6]}])))
    assert [entry.prompt for entry in survey(path).entries()] == [chat, [5, 6]]


def test_a_source_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])}
    DatasetDict(parts).save_to_disk(tmp_path / "in")
    with pytest.raises(CaptureValidationError, match="splits.*test.*train.*--split"):
        survey(tmp_path / "in")
    assert survey(tmp_path / "in", split="test").num_entries == 2


BAD = {
    "no file": ("x.jsonl", None, {}, "no file or folder"),
    "unknown kind": ("x.doc", "a", {}, "unknown kind"),
    "not JSON": (
        "x.jsonl",
        '{"text": "a"}\n{"text": \n',
        {},
        "line 2 is not JSON.*remove it",
    ),
    "a number": ("x.jsonl", "5\n", {}, "line 1 is neither"),
    "not UTF-8": ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', {}, "line 2.*UTF-8"),
    "no column": (
        "x.jsonl",
        '{"text": "a"}',
        {"column": "body"},
        "line 1 has no column 'body'.*with --column",
    ),
    "no usual column": ("x.csv", "a,b\n1,2\n", {}, "name one with --column"),
    "a carried column missing later": (
        "x.jsonl",
        '{"text": "a", "y": 1}\n{"text": "b"}',
        {"carry": ("y",)},
        "line 2 has no column 'y'",
    ),
    "a carried column of the table": (
        "x.jsonl",
        '{"text": "a", "layer": 1}',
        {"carry": ("layer",)},
        "'layer' has the name of a table column",
    ),
    "carried values of two kinds": (
        "x.jsonl",
        '{"text": "a", "y": 1}\n{"text": "a", "y": {"z": 1}}',
        {"carry": ("y",)},
        "carried column 'y'.*no common type",
    ),
    "a carried value of too many bits": (
        "x.jsonl",
        '{"text": "a", "y": 123456789012345678901}',
        {"carry": ("y",)},
        "carried column 'y'.*no common type.*too large",
    ),
    "half of a character": (
        "x.jsonl",
        '{"text": "a"}\n{"text": "b \\ud83d"}',
        {},
        r"line 2 has '.ud83d', half of a character; remove it",
    ),
    "a negative token id": (
        "x.jsonl",
        '{"prompt": [1, -2]}',
        {},
        "line 1: a prompt must be",
    ),
    "one name of two columns": (
        "x.csv",
        "text,b,b\na,1,2\n",
        {"carry": ("b",)},
        "line 1 names 'b' more than once",
    ),
    "too many fields": ("x.csv", "text,b\na,b\na,b,c\n", {}, "line 3 has 3 fields"),
    "an empty prompt": ("x.jsonl", '{"text": ""}', {}, "line 1: a prompt must be"),
    "repeated ids": (
        "x.jsonl",
        '{"text": "a", "id": 1}\n{"text": "b", "id": 1}',
        {"id_column": "id"},
        "line 2 repeats the id '1' of prompt 0",
    ),
    "nothing": ("x.txt", "\n\n", {}, "no prompts"),
    "no Parquet": ("x.parquet", "PAR", {}, "cannot be read as Parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_line(name: str, tmp_path: Path) -> None:
    file, text, chosen, said = BAD[name]
    if text is not None:
        raw = text if isinstance(text, bytes) else text.encode()
        (tmp_path / file).write_bytes(raw)
    with pytest.raises(CaptureValidationError, match=f"(?s){said}"):
        survey(tmp_path / file, **chosen)


def test_a_repeated_id_replaces_the_earlier_prompt_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [{"text": f"t{i}", "id": i % 2} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = survey(path, id_column="id", replace_repeated=True)
    assert [entry.prompt for entry in found.entries()] == ["t3", "t4"]
    assert found.num_entries == 2
