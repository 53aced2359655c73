# SPDX-License-Identifier: Apache-2.0
"""The V2 runner captures, reads out and ends requests like the V1 runner."""

import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1300)]

CHOSEN = {
    "residual/test_nonfinite_streams": "float32 and (infinite or generates)",
    "readouts/engine/test_stop_when": "async and (first_token or comes_late)",
    "capture/engine/test_rows_rule": "async",
    "capture/engine/test_tight_memory": "async",
}


def test_the_v2_runner() -> None:
    # Under Triton's interpreter, which must be chosen before vllm is imported.
    files = [f"tests/v1/{name}.py" for name in CHOSEN]
    tests = [f"{name.split('/')[-1]} and {which}" for name, which in CHOSEN.items()]
    which = " or ".join(f"({one})" for one in tests)
    run_tests("-p", "tests.support.interpreted", "-k", which, *files, timeout=1200)
