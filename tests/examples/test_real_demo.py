# SPDX-License-Identifier: Apache-2.0
"""The command of `make demo MODEL=smollm2`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "real_model" / "demo.py"


def test_the_verb_takes_a_model_that_there_is() -> None:
    def says(model: str) -> str:
        command = ["make", "--dry-run", "demo", f"MODEL={model}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "examples/real_model/demo.py" in says("smollm2")
    assert "examples/demo/run.py" in says("toy")
    assert "MODEL must be toy or smollm2, not gpt" in says("gpt")


@pytest.mark.real
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_on_the_real_model_steers_and_leaves_a_picture(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    (cosine,) = re.findall(r"smallest cosine to Transformers' ([\d.]+)", done.stdout)
    assert float(cosine) > 0.9999
    assert "after block 29: ' Paris'" in done.stdout
    answers = re.findall(r"^   ([+-]\d)  (.*)$", done.stdout, re.MULTILINE)
    assert [scale for scale, _ in answers] == ["-2", "-1", "+0", "+1", "+2"]
    assert len({text for _, text in answers}) == 5
    assert re.search("glad|happy|excited|love", answers[-1][1])
    assert (tmp_path / "smollm2.png").read_bytes().startswith(b"\x89PNG")
