# SPDX-License-Identifier: Apache-2.0
"""The Python code on the pages runs unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs._pages import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # only the sampler would compile something
}
# Settings for a quick start are added, which the pages do not need.
EAGER = """
from functools import partialmethod
import vllm
vllm.LLM.__init__ = partialmethod(vllm.LLM.__init__, enforce_eager=True)
"""


def run(folder: Path, code: str) -> str:
    """Run code in a folder with the examples; returns its output."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "page.py").write_text(EAGER + code)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme(tmp_path: Path) -> None:
    capture, steer = blocks(ROOT / "README.md", "python")
    printed = run(tmp_path, f"{capture}\n    del llm\n{steer}")
    assert ", 192])" in printed
    texts = [line.partition("  # ")[2] for line in steer.splitlines() if "  # " in line]
    assert len(texts) == 3 and all(f" {text}" in printed for text in texts)


def test_the_capture_and_file_guides(tmp_path: Path) -> None:
    guide = "\n".join(blocks(ROOT / "docs" / "capture" / "index.md", "python"))
    files = "\n".join(blocks(ROOT / "docs" / "capture" / "files.md", "python"))
    check = """
from vllm.v1.capture.consumers.filesystem import read_request
ours = read_request(FOLDER, "trial", "one")[3, "post_block"].float().numpy()
assert (ours == rows).all() and len(rows) > 10
"""
    code = f"{guide}\n{files}\n{check}".replace("FOLDER", '"/tmp/captures"')
    printed = run(tmp_path, code.replace("/tmp/captures", str(tmp_path / "captures")))
    assert "status='ok'" in printed


def test_the_guide_to_rows_that_stay(tmp_path: Path) -> None:
    printed = run(tmp_path, *blocks(ROOT / "docs" / "capture" / "memory.md", "python"))
    assert printed.count("torch.Size([1, 192])") == 2 and "held_bytes" in printed


def test_the_guide_to_rows_in_the_response(tmp_path: Path) -> None:
    offline, live, read = blocks(ROOT / "docs" / "capture" / "rows.md", "python")
    check = """
from vllm.v1.capture.frontend.http import rows_as_json
for encoding in (None, "zstd"):
    rows.encoding = encoding
    for entry in rows_as_json("", rows):
        assert torch.equal(read(entry), rows[entry["layer"], entry["hook"]])
"""
    printed = run(tmp_path, "\n".join([offline, live, read, check]))
    assert ", 192])" in printed


def test_the_consumer_guide(tmp_path: Path) -> None:
    consumer, use, test = blocks(ROOT / "docs" / "capture" / "consumers.md", "python")
    (tmp_path / "mean_norm.py").write_text(consumer)
    printed = run(tmp_path, f"{use}\n{test}")
    assert "{'0': " in printed and "'5': " in printed


def test_the_steering_guides(tmp_path: Path) -> None:
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
    printed = run(tmp_path, "\n".join([request, everything, pack, files, check]))
    assert "'post_block': {'2': {'norm': 17.8" in printed
