# SPDX-License-Identifier: Apache-2.0
"""The examples of capture, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "capture"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("logit_lens.py", "layer  5"),
        ("probe_from_parquet.py", "layer 5: 0."),
        ("compare_prompts.py", "layers of prompt 0:"),
    ],
)
def test_an_example_says_what_its_header_promises(script: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert said in done.stdout
