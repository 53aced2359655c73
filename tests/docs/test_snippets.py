# SPDX-License-Identifier: Apache-2.0
"""The Python code on the pages runs unchanged."""

from pathlib import Path

import pytest

from tests.docs._pages import ROOT, blocks
from tests.support.scripts import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_readme(run_script: Run) -> None:
    # `test_tutorial.py` runs the last one, which needs a server.
    capture, steer, _ = blocks(ROOT / "README.md", "python")
    printed = run_script(f"{capture}\n    del llm\n{steer}")
    assert ", 192])" in printed
    texts = [line.partition("  # ")[2] for line in steer.splitlines() if "  # " in line]
    assert len(texts) == 3 and all(f" {text}" in printed for text in texts)


def test_the_capture_and_file_guides(run_script: Run, tmp_path: Path) -> None:
    guide = "\n".join(blocks(ROOT / "docs" / "capture" / "index.md", "python"))
    files = "\n".join(blocks(ROOT / "docs" / "capture" / "files.md", "python"))
    check = """
from vllm.v1.capture.consumers.filesystem import read_request
ours = read_request(FOLDER, "trial", "one")[3, "post_block"].float().numpy()
assert (ours == rows).all() and len(rows) > 10
"""
    code = f"{guide}\n{files}\n{check}".replace("FOLDER", '"/tmp/captures"')
    printed = run_script(code.replace("/tmp/captures", str(tmp_path / "captures")))
    assert "status='ok'" in printed


def test_the_guide_to_rows_that_stay(run_script: Run) -> None:
    printed = run_script(*blocks(ROOT / "docs" / "capture" / "memory.md", "python"))
    assert printed.count("torch.Size([1, 192])") == 2 and "held_bytes" in printed


def test_the_guide_to_rows_in_the_response(run_script: Run) -> None:
    offline, live, read = blocks(ROOT / "docs" / "capture" / "rows.md", "python")
    check = """
from vllm.v1.capture.frontend.http import as_json
for entry in as_json(output.capture_results)["inline"]["payload"]:
    assert torch.equal(read(entry), rows[entry["layer"], entry["hook"]])
"""
    printed = run_script("\n".join([offline, live, read, check]))
    assert ", 192])" in printed


def test_the_consumer_guide(run_script: Run, tmp_path: Path) -> None:
    consumer, use, test = blocks(ROOT / "docs" / "capture" / "consumers.md", "python")
    (tmp_path / "mean_norm.py").write_text(consumer)
    printed = run_script(f"{use}\n{test}")
    assert "{'0': " in printed and "'5': " in printed


def test_the_guide_to_patching(run_script: Run) -> None:
    first, second = blocks(ROOT / "docs" / "steering" / "patching.md", "python")
    check = """
assert trace.clean == zeros.clean and trace.corrupt != trace.clean
assert "post_block" in result._repr_html_() and not trace.skipped
"""
    second = "\n".join("    " + line for line in (second + check).splitlines())
    printed = run_script(f"{first}\n{second}")
    assert "(6, 3)" in printed


def test_the_steering_guides(run_script: Run) -> None:
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
    printed = run_script("\n".join([request, everything, pack, files, check]))
    assert "'post_block': {'2': {'norm': 17.8" in printed
