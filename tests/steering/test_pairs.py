# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest

from vllm.steering.pairs import Pair, read_pairs, read_prompts
from vllm.v1.steering.errors import SteeringValidationError

CHAT = [{"role": "user", "content": "Hello."}]


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    return path


def test_pairs_are_read_from_lines_and_from_a_list(tmp_path: Path) -> None:
    entries = [{"positive": "yes", "negative": "no"}] * 2
    expected = [Pair("yes", "no")] * 2
    assert read_pairs(write(tmp_path / "pairs.jsonl", entries)) == expected
    (tmp_path / "pairs.json").write_text(json.dumps(entries, indent=2))
    assert read_pairs(tmp_path / "pairs.json") == expected
    chats = write(tmp_path / "chats.jsonl", [{"positive": CHAT, "negative": CHAT}])
    assert read_pairs(chats) == [Pair(CHAT, CHAT)]


def test_prompts_are_lines_or_json(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two"]
    assert read_prompts(write(tmp_path / "p.jsonl", ["one", CHAT])) == ["one", CHAT]


def test_only_line_feeds_end_a_line_and_a_mark_of_utf_8_is_no_text(
    tmp_path: Path,
) -> None:
    text = "one\u2028\x0c\x85 two"
    (tmp_path / "p.txt").write_text(f"\ufeff{text}\r\nthree\n")
    assert read_prompts(tmp_path / "p.txt") == [text, "three"]
    line = json.dumps({"positive": text, "negative": "no"}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_text(f"\ufeff{line}\n\n{{\n")
    with pytest.raises(SteeringValidationError, match="line 3 of .*not JSON"):
        read_pairs(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text(f"\ufeff{line}\n")
    assert read_pairs(tmp_path / "p.jsonl") == [Pair(text, "no")]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "no entries"),
        (["text"], "entry 1 .* must be"),
        ([{"positive": "yes"}], "entry 1 .* must be"),
        ([{"positive": "yes", "negative": "no", "weight": 1}], "entry 1 .* must be"),
        ([{"positive": "yes", "negative": ""}], "a text or a list of chat"),
        ([{"positive": "yes", "negative": [{"role": "user"}]}], "a text or a list"),
        ([{"positive": "yes", "negative": CHAT}], "mixes texts and chats"),
    ],
)
def test_bad_pairs_are_refused(tmp_path: Path, entries: list[Any], said: str) -> None:
    with pytest.raises(SteeringValidationError, match=said):
        read_pairs(write(tmp_path / "pairs.jsonl", entries))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SteeringValidationError, match="cannot be read"):
        read_pairs(tmp_path / "missing.jsonl")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(SteeringValidationError, match="line 1 .*not JSON"):
        read_pairs(tmp_path / "bad.jsonl")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(SteeringValidationError, match="empty"):
        read_prompts(tmp_path / "empty.txt")
