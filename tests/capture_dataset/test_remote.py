# SPDX-License-Identifier: Apache-2.0
"""Answers of a server that are not what was asked for end in a message."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clearbox_client.connection import Connections

from tests.capture_dataset._collecting import ROOT, collected
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.manifest import NAME, Manifest
from vllm.capture_dataset.remote import Server, positions_of
from vllm.capture_dataset.runners import CaptureRunError
from vllm.capture_dataset.servers import ServersRunner
from vllm.v1.capture.errors import CaptureValidationError

WIDTH = 4
TOKENIZER = str(ROOT / "examples/demo_model/weights")
Change = Callable[[dict[str, Any]], object]
Answers = dict[str, Change]
"""What is done to the answer to a path."""


def entry(layer: int, positions: list[int], values: Any = 1.0) -> dict[str, Any]:
    rows = np.full((len(positions), WIDTH), values, "<f4")
    return {
        "layer": layer,
        "hook": "post_block",
        "positions": positions,
        "dtype": "float32",
        "shape": list(rows.shape),
        "data": base64.b64encode(rows.tobytes()).decode(),
    }


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    changes: Answers = {}

    @contextmanager
    def ask(
        _: Connections, method: str, path: str, body: bytes = b"", headers: Any = None
    ) -> Iterator[Any]:
        told: dict[str, Any] = {"data": [{"id": "m", "max_model_len": 64}]}
        if path == "/v1/capture":
            points = {str(layer): ["post_block"] for layer in range(2)}
            told = {"consumers": [{"name": "inline"}], "hook_points": points}
        if path == "/v1/readouts":
            told = {"modules": {}}
        if path == "/v1/completions":
            asked = json.loads(body)
            ids, spec = asked["prompt"], asked["capture"]["inline"]
            end = len(ids) + asked["max_tokens"] - 1
            first = len(ids) - 1 if spec["positions"] == "last_prompt" else 0
            positions = list(range(first, first + 1 if first else end))
            payload = [entry(layer, positions) for layer in spec["hooks"]["post_block"]]
            told = {
                "choices": [{"token_ids": [7] * asked["max_tokens"]}],
                "capture_results": {"inline": {"status": "ok", "payload": payload}},
            }
        if path != "/v1/completions" or len(ids) > 1:  # not the question for the width
            changes.get(path, lambda _: None)(told)
        content = told.get("instead", json.dumps(told))
        sent = content.encode() if isinstance(content, str) else content
        kind = "application/json"
        yield SimpleNamespace(status=200, kind=kind, read=lambda: sent)

    monkeypatch.setattr(Connections, "ask", ask)
    return changes


def run(folder: Path, **rows: Any) -> Manifest:
    source = folder / "in.jsonl"
    source.write_text(json.dumps({"prompt": [5, 6, 7]}))
    runner = ServersRunner([Server("http://m", TOKENIZER, None, concurrency=1)])
    chosen = {"id_column": None, "carry": (), "layers": (), "max_tokens": 2}
    return collected(source, folder / "out", runner, **chosen | rows)


def payload(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told["capture_results"]["inline"]["payload"]
    return found


@pytest.mark.parametrize("positions", [[], [1], [0, 2]])
def test_a_server_may_keep_some_rows(
    answers: Answers, tmp_path: Path, positions: list[int]
) -> None:
    def keep(told: dict[str, Any]) -> None:
        rows = [entry(layer, positions) for layer in range(2)]
        told["capture_results"]["inline"]["payload"] = rows if positions else None
        told["readouts"] = {
            "size": {
                "kind": "norm",
                "positions": [0, 1, 2, 3],
                "taps": [[0, "post_block"], [1, "post_block"]],
                "norm": [[at, 10 * at] for at in range(4)],
                "cosine": [[None, 1.0]] * 4,
            }
        }

    answers["/v1/completions"] = keep
    run(
        tmp_path,
        readouts={"size": {"kind": "norm"}},
        keep_when={"readout": "size", "above": 1, "scope": "token"},
    )
    data = load_dataset(tmp_path / "out")
    assert data.columns.column("position").to_pylist() == positions
    assert data.layer(1).readout("size.norm").tolist() == [10 * p for p in positions]


def nothing(told: dict[str, Any]) -> None:
    told["capture_results"]["inline"]["payload"] = []


def whole_numbers(told: dict[str, Any]) -> None:
    payload(told)[0]["dtype"] = "int32"


WRONG: list[tuple[Change, str]] = [
    (nothing, "rows of"),
    (lambda told: payload(told).pop(), "rows of"),
    (lambda told: payload(told).append(entry(1, [0])), "."),
    (lambda told: payload(told)[0].update(positions=[0, 0, 0, 0]), "other positions"),
    (lambda told: payload(told)[0].update(positions=[0]), "."),
    (lambda told: payload(told)[0].update(entry(0, [0, 1, 2])), "other positions"),
    (whole_numbers, "dtype 'int32'"),
    (lambda told: payload(told)[1].update(dtype="float16"), "."),
    (lambda told: payload(told)[0].update(shape=[8, 2]), "8 rows"),
    (lambda told: payload(told)[1].update(entry(1, [0, 1, 2, 3], np.nan)), "finite"),
    (lambda told: payload(told)[1].update(entry(1, [0, 1, 2, 3], np.inf)), "finite"),
    (lambda told: payload(told)[0].update(data="%%%"), "."),
    (lambda told: payload(told)[0].pop("shape"), "shape"),
    (lambda told: told.pop("choices"), "choices"),
    (lambda told: told.update(choices=[{"token_ids": []}]), "0 tokens"),
    (lambda told: told.update(choices=[{"token_ids": ["a", "b"]}]), "ids of tokens"),
    (lambda told: told.update(capture_results=[1]), "."),
    (lambda told: told.update(readouts={"x": 3}), "."),
    (lambda told: told.update(instead="[" * 100_000), "."),
    (lambda told: told.update(instead="[]"), "."),
    (lambda told: told.update(instead=b"\xff"), "."),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_rows_that_were_not_asked_for_are_refused(
    answers: Answers, tmp_path: Path, change: Change, said: str
) -> None:
    answers["/v1/completions"] = change
    with pytest.raises(CaptureRunError, match=f"not what was asked for: .*{said}"):
        run(tmp_path)
    assert not Manifest.read(tmp_path / "out").complete


@pytest.mark.parametrize("path", ["/v1/models", "/v1/capture"])
@pytest.mark.parametrize("instead", ["[]", "{}", "3", "no", "[" * 100_000])
def test_a_server_of_another_kind_is_refused(
    answers: Answers, path: str, instead: str
) -> None:
    answers[path] = lambda told: told.update(instead=instead)
    with pytest.raises(CaptureValidationError, match="^server: .*--capture-consumers"):
        Server("http://m", TOKENIZER, None, concurrency=1)


def test_what_was_asked_for_becomes_a_data_set(
    answers: Answers, tmp_path: Path
) -> None:
    assert run(tmp_path).complete and not answers
    assert load_dataset(tmp_path / "out").layer(1)[0].shape == (4, WIDTH)


@pytest.mark.parametrize(
    ("selector", "positions"),
    [
        ("last_prompt", [3]),
        ("all_prompt", [0, 1, 2, 3]),
        ("all_generated", [4, 5]),
        ("last_generated", [5]),
        ("all", [0, 1, 2, 3, 4, 5]),
        ([-1, 0, 5, 9], [0, 3, 5]),
        ({"last": 2}, [2, 3]),
        ({"ranges": [[1, 2], [4, 7]]}, [1, 2, 4, 5]),
    ],
)
def test_positions_are_those_of_a_request_that_ended(
    selector: Any, positions: list[int]
) -> None:
    assert positions_of(selector, 4, 3) == positions


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b", "..", ""])
@pytest.mark.parametrize("field", ["file", "files"])
def test_files_of_a_manifest_lie_in_its_folder(
    answers: Answers, tmp_path: Path, name: str, field: str
) -> None:
    run(tmp_path)
    path = tmp_path / "out" / NAME
    content = json.loads(path.read_text())
    content["shards"][0][field] = name if field == "file" else {name: "0"}
    path.write_text(json.dumps(content))
    with pytest.raises(CaptureValidationError, match="no file of the folder"):
        load_dataset(tmp_path / "out")
