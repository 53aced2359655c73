# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path

import pytest

from benchmarks.harness.child import Child

ROOT = Path(__file__).resolve().parents[2]
TWICE = """
import sys
sys.path.append(sys.argv[1])
from benchmarks.harness.child import answers, requests
answer = answers()
print("a library says hello")
answer("ready")
for request in requests():
    answer(request * 2)
    if request == "end":
        break
"""


def test_what_is_asked_is_answered_and_what_is_printed_is_in_the_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "new" / "log"
    command: list[str | Path] = [sys.executable, "-c", TWICE, ROOT]
    # Engines of this process set a variable whose errors the loader prints.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    with Child(command, log, environment, tmp_path) as child:
        assert child.answer() == "ready"
        assert [child.ask(one) for one in (2, "ä\n", [1])] == [4, "ä\nä\n", [1, 1]]
    assert log.read_text().strip() == "a library says hello"


def test_a_process_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    with Child(
        [sys.executable, "-c", TWICE, ROOT], tmp_path / "log", os.environ
    ) as child:
        child.answer()
        assert child.ask("end") == "endend"
        with pytest.raises(RuntimeError, match=str(tmp_path / "log")):
            child.ask(1)
