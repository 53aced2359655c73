# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.model_executor.layers.residual import spread

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("no_engine")


def test_hook_points_over_shares_do_what_one_over_all_tokens_does(
    tmp_path: Path,
) -> None:
    """Covers ranks with padding only, compiled code, and edited rows."""
    module = "tests.model_executor.layers.residual.ranks"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path), "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,  # They take ten seconds, and all cores of the machine.
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_rank_has_the_tokens_behind_those_of_the_ranks_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spread, "get_tensor_model_parallel_rank", lambda: 2)
    assert list(range(20))[spread.share(3)] == [6, 7, 8]
