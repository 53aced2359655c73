# SPDX-License-Identifier: Apache-2.0
"""The command `vllm capture`: formats and options, on one engine."""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.capture_dataset._collecting import ROOT, contents
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.formats import WRITERS
from vllm.capture_dataset.manifest import NAME
from vllm.capture_dataset.runners import EngineRunner
from vllm.entrypoints.cli.capture import run as command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = ROOT / "examples/demo_model/weights"
LINES = [
    {"text": f"Anna went home {'again ' * i}and slept.", "label": i % 2, "key": f"k{i}"}
    for i in range(9)
]
PLAIN = ("--model", str(MODEL), "--layers", "1,4")

Call = Callable[..., str]


def run(capsys: Any, *words: Any, status: int = 0) -> str:
    """Run the command and check its status; returns its output."""
    from vllm.entrypoints.cli.main import main

    typed = ["vllm", "capture", *map(str, words)]
    with mock.patch.object(sys, "argv", typed), pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    code = ended.value.code
    if isinstance(code, str):  # Python prints it and exits with 1.
        err, code = err + code, 1
    assert code == status, err[-2000:]
    return out + err


@pytest.fixture
def call(runner: EngineRunner, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """`run` with the shared engine."""
    with (
        mock.patch.object(command, "_runner", lambda _args: runner),
        mock.patch.object(EngineRunner, "close"),
    ):
        yield partial(run, capsys)


def jsonl(path: Path, lines: list[Any] = LINES) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("format", WRITERS)
def test_every_format_is_whole_and_resumes_to_nothing(
    call: Call, tmp_path: Path, format: str
) -> None:
    source, out = jsonl(tmp_path / "in.jsonl"), tmp_path / "out"
    words = (source, *PLAIN, "--out", out, "--format", format, "--context-size", 4)
    call(*words, "--shard-size", "64K")
    before = contents(out)
    manifest = json.loads((out / NAME).read_text())
    assert manifest["complete"] and len(manifest["shards"]) > 1
    assert manifest["counts"]["num_prompts"] == 9
    assert manifest["facts"]["model"]["weights"] and manifest["about"]["version"]
    assert "holds a data set already" in call(*words, status=1)
    call(*words, "--shard-size", "64K", "--resume")
    assert contents(out) == before
    with mock.patch.object(command, "_runner", side_effect=AssertionError):
        other = ("--shard-size", "64KiB", "--resume", "--max-tokens", 2)
        assert "was begun with max_tokens 1" in call(*words, *other, status=1)


def test_options_choose_prompts_rows_and_types(call: Call, tmp_path: Path) -> None:
    repeated = [*LINES, LINES[0] | {"text": "Max ran."}]
    source, out = jsonl(tmp_path / "in.jsonl", repeated), tmp_path / "out"
    words = [source, "--model", MODEL, "--out", out, "--id", "key", "--layers", "0-2,5"]
    assert "line 10 repeats the id 'k0'" in call(*words, status=1)
    words += ["--on-repeated-id", "replace", "--truncate", 5, "--values-dtype"]
    words += ["float16", "--hook", "pre_attn,post_attn,resid_pre"]
    words += ["--positions", "[0,6]", "--layers", "1"]
    # None is lost, or there twice.
    words += ["--carry", "label,label", "--carry", "text"]
    call(*words, "--max-tokens", 3, "--compression", "zstd")
    data = load_dataset(out)
    assert len(data) == 9 and len(data.taps) == 8
    assert data.layer(5, "post_attn")[3].shape == (2, 192)
    assert data.layer(0).to_torch().dtype == torch.float16
    assert data.samples.column("prompt_id").to_pylist()[-1] == "k0"
    assert data.samples.column("label").to_pylist() == [*map(int, "101010100")]
    assert data.samples.column("text")[-1].as_py() == "Max ran."
    assert data.columns.column("is_prompt").to_pylist()[:2] == [True, False]


def test_a_hook_may_be_an_address(call: Call, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "in.jsonl"), tmp_path / "out"
    words = [source, "--model", MODEL, "--out", out, "--limit", 2, "--hook"]
    for wrong in (["resid_post.1", "--layers", 1], ["resid_post.1,post_block"]):
        assert "addresses include the layers" in call(*words, *wrong, status=1)
    call(*words, "blocks.4.hook_resid_post,resid_post.1")
    assert load_dataset(out).taps == [(1, "post_block"), (4, "post_block")]


def test_chats_and_limits(call: Call, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl")
    for name, chat in (("plain", ()), ("chat", ("--chat",))):
        words = (source, *PLAIN, "--out", tmp_path / name, "--limit", 2)
        call(*words, "--column", "text", "--positions", "last_prompt", *chat)
    plain, chat_ = (load_dataset(tmp_path / name) for name in ("plain", "chat"))
    assert len(plain) == len(chat_) == 2
    longer = [d.columns.column("position").to_pylist()[0] for d in (plain, chat_)]
    assert longer[0] < longer[1]


def test_readouts_are_taken_and_refused(call: Call, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "in.jsonl"), tmp_path / "out"
    spec = 'top={"kind":"lens","top_k":2}'
    words = (source, *PLAIN, "--out", out)
    call(*words, "--readout", "norm", "--readout", spec)
    view = load_dataset(out).layer(4)
    sizes = np.linalg.norm(view.to_numpy(), axis=1)
    assert np.allclose(view.readout("norm.norm"), sizes, rtol=1e-4)
    other = (source, *PLAIN, "--out", tmp_path / "other")
    for readout, said in (
        ("probe", "must be a name, or an object with vectors"),
        ("nothing", "must be one of"),
        ('x={"kind":"lens","layers":[3]}', "whose rows are not captured"),
        ('x={"kind":"sae","sae":"gone"}', "no sae 'gone'"),
    ):
        assert said in call(*other, "--readout", readout, status=1)
    assert not (tmp_path / "other").exists()


def test_a_dry_run_tells_and_writes_nothing(call: Call, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl")
    told = call(source, *PLAIN, "--dry-run", "--readout", "lens")
    names = [line.split()[0] for line in told.splitlines() if line]
    wanted = ["prompts", "tokens", "rows", "bytes", "read", "time"]
    assert [name for name in names if name in wanted] == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    call(source, *PLAIN, "--out", tmp_path / "out")
    rows = 2 * load_dataset(tmp_path / "out").columns.num_rows
    assert "prompts     9\n" in told and f"{rows:,} of 192 float32" in told


def test_a_disk_that_is_full_leaves_what_is_there_and_says_what_to_do(
    call: Call, tmp_path: Path
) -> None:
    """A limit on the size of files simulates a full disk: writes fail in the system."""
    source = tmp_path / "in.jsonl"
    jsonl(
        source, [{"prompt": [20 + i] * 10} for i in range(9)] + [{"prompt": [9] * 200}]
    )
    words = (source, *PLAIN, "--out", tmp_path / "out", "--shard-size", "30K")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, hard))
    try:
        said = call(*words, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "could not be written" in said and "--resume" in said
    data = load_dataset(tmp_path / "out")
    data.verify()
    assert 0 < len(data) < 10 and not data.manifest.complete
    call(*words, "--resume")
    call(source, *PLAIN, "--out", tmp_path / "whole", "--shard-size", "30K")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_without_room_is_refused_before_anything_runs(
    call: Call, tmp_path: Path
) -> None:
    source, out = jsonl(tmp_path / "in.jsonl"), tmp_path / "out"
    with (
        mock.patch.object(command, "disk_usage", lambda _: mock.Mock(free=100)),
        mock.patch.object(EngineRunner, "run", side_effect=AssertionError),
    ):
        said = call(source, *PLAIN, "--out", out, status=1)
    assert "the disk has 100 B" in said and "make room" in said and not out.exists()


def test_a_model_that_cannot_be_loaded_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, gone = jsonl(tmp_path / "in.jsonl"), str(tmp_path / "gone")
    words = (source, "--model", gone, "--layers", 1, "--out", tmp_path / "out")
    told = run(capsys, *words, status=1)
    assert "vllm capture: " in told and gone in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.jsonl", "--model", "m", "--out", "o"], "no file or folder"),
        (["{source}", "--out", "o"], "give --model MODEL or --server URL"),
        (["{source}", "--model", "m"], "give the data set"),
        (["{source}", "--model", "m", "--out", "o", "--hook", "x"], "unknown"),
        (
            ["{source}", "--model", "m", "--out", "o", "--positions", "al"],
            "positions must",
        ),
        (
            ["{source}", "--model", "m", "--out", "o", "--positions", "all_generated"],
            "give a larger --max-tokens",
        ),
        (["{source}", "--model", "m", "--out", "o", "--column", "y"], "no column 'y'"),
        (["{source}", "--model", "m", "--out", "o", "--limit", "0"], "at least 1"),
        (["{source}", "--server", "http://127.0.0.1:9", "--out", "o"], "server: http"),
        (
            ["{source}", "--model", f"{MODEL}", "--out", "o", "--layers", "6"],
            "6 layers",
        ),
    ],
)
def test_mistakes_are_reported_before_a_model_is_loaded(
    words: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    source = jsonl(tmp_path / "in.jsonl")
    given = (word.format(source=source) for word in words)
    assert said in run(capsys, *given, status=1)


def test_help_lists_the_options(capsys: Any) -> None:
    told = run(capsys, "--help")
    for option in ("--carry", "--positions", "--shard-size", "--resume", "--server"):
        assert option in told
    assert "SOURCE" in told and "--gpu-memory-utilization" not in told


def test_an_interrupt_leaves_what_is_there(
    call: Call, tmp_path: Path, runner: EngineRunner
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": [20 + i] * 10} for i in range(9)])
    words = (source, *PLAIN, "--out", tmp_path / "out", "--shard-size", "30K")
    runs, real = [], EngineRunner.run

    def interrupted(self: Any, *arguments: Any) -> Iterator[Any]:
        runs.append(0)
        if len(runs) == 3:
            raise KeyboardInterrupt
        yield from real(self, *arguments)

    with mock.patch.object(EngineRunner, "run", interrupted):
        said = call(*words, status=command.INTERRUPTED)
    assert "is readable, continue with --resume" in said
    assert 0 < len(load_dataset(tmp_path / "out")) < 9
    call(*words, "--resume")
    assert len(load_dataset(tmp_path / "out")) == 9
