# SPDX-License-Identifier: Apache-2.0
"""The Python code on the pages runs unchanged."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs._pages import ROOT, blocks
from vllm import LLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Run = Callable[..., str]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run code as a script in a folder with the examples; returns its output.

    In this process, as most of a script's time is the import of vLLM. Engines are
    eager, which the pages do not need, and are stopped after the test.
    """
    opened: list[LLM] = []
    begin = LLM.__init__

    def begin_eagerly(llm: LLM, *arguments: Any, **options: Any) -> None:
        begin(llm, *arguments, **{"enforce_eager": True} | options)
        opened.append(llm)

    monkeypatch.setattr(LLM, "__init__", begin_eagerly)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(*code: str) -> str:
        (tmp_path / "page.py").write_text("\n".join(code))
        runpy.run_path("page.py", run_name="__main__")
        return capsys.readouterr().out

    yield run
    for llm in opened:
        llm.llm_engine.engine_core.shutdown()


def test_the_readme(run: Run) -> None:
    capture, steer = blocks(ROOT / "README.md", "python")
    printed = run(f"{capture}\n    del llm\n{steer}")
    assert ", 192])" in printed
    texts = [line.partition("  # ")[2] for line in steer.splitlines() if "  # " in line]
    assert len(texts) == 3 and all(f" {text}" in printed for text in texts)


def test_the_capture_and_file_guides(run: Run, tmp_path: Path) -> None:
    guide = "\n".join(blocks(ROOT / "docs" / "capture" / "index.md", "python"))
    files = "\n".join(blocks(ROOT / "docs" / "capture" / "files.md", "python"))
    check = """
from vllm.v1.capture.consumers.filesystem import read_request
ours = read_request(FOLDER, "trial", "one")[3, "post_block"].float().numpy()
assert (ours == rows).all() and len(rows) > 10
"""
    code = f"{guide}\n{files}\n{check}".replace("FOLDER", '"/tmp/captures"')
    printed = run(code.replace("/tmp/captures", str(tmp_path / "captures")))
    assert "status='ok'" in printed


def test_the_guide_to_rows_that_stay(run: Run) -> None:
    printed = run(*blocks(ROOT / "docs" / "capture" / "memory.md", "python"))
    assert printed.count("torch.Size([1, 192])") == 2 and "held_bytes" in printed


def test_the_guide_to_rows_in_the_response(run: Run) -> None:
    offline, live, read = blocks(ROOT / "docs" / "capture" / "rows.md", "python")
    check = """
from vllm.v1.capture.frontend.http import rows_as_json
for encoding in (None, "zstd"):
    rows.encoding = encoding
    for entry in rows_as_json("", rows):
        assert torch.equal(read(entry), rows[entry["layer"], entry["hook"]])
"""
    printed = run("\n".join([offline, live, read, check]))
    assert ", 192])" in printed


def test_the_consumer_guide(run: Run, tmp_path: Path) -> None:
    consumer, use, test = blocks(ROOT / "docs" / "capture" / "consumers.md", "python")
    (tmp_path / "mean_norm.py").write_text(consumer)
    printed = run(f"{use}\n{test}")
    assert "{'0': " in printed and "'5': " in printed


def test_the_steering_guides(run: Run) -> None:
    request, client, everything = blocks(
        ROOT / "docs" / "steering" / "index.md", "python"
    )
    pack, files = blocks(ROOT / "docs" / "steering" / "files.md", "python")
    check = """
form = {"post_block": pack([2], vector[None])}
(one,) = llm.generate("Anna", SamplingParams(max_tokens=2, steering_vectors=form))
assert one.outputs[0].text and (same.vectors[2, "post_block"] == 1).all()
"""
    assert "extra_body" in client
    printed = run("\n".join([request, everything, pack, files, check]))
    assert "'post_block': {'2': {'norm': 17.8" in printed
