# SPDX-License-Identifier: Apache-2.0
"""The command line, on the miniature checkout."""

import json
from pathlib import Path

import pytest

from fork.__main__ import main
from tests.fork._checkout import Mini, make_wheel


@pytest.fixture
def arguments(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("fork.commands._options.HERE", mini.checkout)
    return ["--device", "cpu", "--wheel", str(mini.wheel), "--jobs", "1"]


def test_build_says_what_it_made(
    mini: Mini, arguments: list[str], capsys, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["build", *arguments, "--out", str(out)]) == 0
    assert "1 files woven, 1 added" in capsys.readouterr().out
    assert "count(y)" in (out / "vllm/engine.py").read_text()


def test_build_reports_faults_and_fails(
    mini: Mini, arguments: list[str], capsys
) -> None:
    mini.write("vllm/data/table.json", "ours")
    assert main(["build", *arguments]) == 1
    errors = capsys.readouterr().err
    assert "would replace a file of vLLM 1.2.3" in errors
    assert "1 fault(s), nothing was changed" in errors


def test_diff_is_a_diff_and_nothing_else(arguments: list[str], capfd) -> None:
    assert main(["diff", *arguments]) == 0
    printed = capfd.readouterr().out.splitlines()
    headers = ("diff --git", "new file", "index")
    assert [line for line in printed if not line.startswith(headers)] == [
        *("--- a/vllm/_version.py", "+++ b/vllm/_version.py", "@@ -1 +1,5 @@"),
        "-__version__ = '1.2.3'",
        '+"""Version of the fork; upstream\'s release number, then ours."""',
        "+",
        '+__version__ = version = "1.2.3+clearbox.1.cpu"',
        '+__version_tuple__ = version_tuple = (1, 2, 3, "clearbox.1.cpu")',
        "+__commit_id__ = commit_id = None",
        *("--- a/vllm/engine.py", "+++ b/vllm/engine.py", "@@ -1,3 +1,4 @@"),
        *(" def step(x):", "     y = x + 1", "+    count(y)", "     return y"),
        *("--- /dev/null", "+++ b/vllm/ours/new.py", "@@ -0,0 +1 @@", "+VALUE = 1"),
    ]
    assert main(["diff", *arguments, "--stat"]) == 0
    assert "3 files changed, 7 insertions(+), 1 deletion" in capfd.readouterr().out


def test_check_passes_and_says_what_it_tested(arguments: list[str], capsys) -> None:
    assert main(["check", *arguments]) == 0
    text = capsys.readouterr().out
    assert "fits  vllm/engine.py (edits)" in text
    assert "nothing was imported or run" in text


def test_check_names_what_no_longer_fits(
    mini: Mini, arguments: list[str], capsys
) -> None:
    path = mini.checkout.edits / "vllm/engine.py"
    path.write_text(path.read_text().replace("y = x + 1", "y = x + 2"))
    assert main(["check", *arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["upstream"] == "1.2.3"
    assert report["fits"] is False
    (file,) = report["files"]
    assert file["module"] == "vllm/engine.py"
    assert [fault["kind"] for fault in file["faults"]] == ["MissingAnchor"]


def test_check_of_another_release(
    mini: Mini, capsys, tmp_path: Path, arguments
) -> None:
    wheel = make_wheel(tmp_path / "later", "1.3.0")
    options = ["--upstream", "1.3.0", "--wheel", str(wheel)]
    assert main(["check", "--device", "cpu", "--jobs", "1", *options]) == 0
    assert "vLLM 1.3.0: all fit (1 edit files" in capsys.readouterr().out


def test_another_release_is_built_into_its_own_folder(
    mini: Mini, tmp_path: Path, arguments: list[str], capsys
) -> None:
    wheel = make_wheel(tmp_path / "later", "1.3.0")
    options = ["--upstream", "1.3.0", "--wheel", str(wheel)]
    assert main(["build", "--device", "cpu", "--jobs", "1", *options]) == 0
    tree = mini.checkout.root / "build/cpu-1.3.0/vllm"
    assert "1.3.0+clearbox.1.cpu" in (tree / "_version.py").read_text()
    assert not mini.out.exists()


def test_torch_is_what_the_wheel_asks_for(arguments: list[str], capsys) -> None:
    assert main(["torch", *arguments]) == 0
    assert capsys.readouterr().out == "torch==2.13.0\n"


def test_a_hash_needs_a_wheel(mini: Mini, arguments: list[str], capsys) -> None:
    assert main(["build", "--device", "cpu", "--wheel-sha256", "0" * 64]) == 1
    assert "--wheel-sha256 needs --wheel" in capsys.readouterr().err
