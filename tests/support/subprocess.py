# SPDX-License-Identifier: Apache-2.0
"""Runs tests that need a separate process: other settings, or lasting side effects."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "CLEARBOX_TEST_APART"


def run_tests(*arguments: str, timeout: float = 600, **environment: str) -> str:
    """Run pytest on tests in another process; fails if one of them does."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ | {MARK: "1"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    report = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, report
    assert " passed" in done.stdout, report
    return done.stdout
