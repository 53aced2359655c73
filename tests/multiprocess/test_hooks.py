# SPDX-License-Identifier: Apache-2.0
"""Hook functions see and change whole rows, however many ranks have the model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.hooked import PROMPTS
from tests.support.models import llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]


def run(model: Path, ranks: int, found: Path) -> Any:
    command = [sys.executable, "-m", "tests.multiprocess.hooked"]
    command += [str(model), str(ranks), str(found)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text())


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        return [one for key in sorted(found) for one in numbers(found[key])]
    if isinstance(found, list):
        return [one for part in found for one in numbers(part)]
    return [float(found)] if isinstance(found, (int, float)) else []


def test_two_ranks_give_what_one_does(tmp_path: Path) -> None:
    model = llama(tmp_path / "llama")
    alone, shared = (run(model, n, tmp_path / f"{n}.json") for n in (1, 2))
    for one, two in zip(alone, shared, strict=True):
        assert one["tokens"] == two["tokens"]
        assert numbers(two) == pytest.approx(numbers(one), rel=1e-3, abs=1e-3)
    hooked, plain = alone
    calls = 3 * (len(PROMPTS[0]) + len(hooked["tokens"]) - 1)
    assert len(numbers(hooked["saved"])) >= calls and not plain["saved"]
