# SPDX-License-Identifier: Apache-2.0
"""The V2 runner ends requests like the V1 runner."""

from pathlib import Path

import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FILE = Path(__file__).parent / "test_nonfinite_streams.py"


@pytest.mark.timeout(1300)
def test_streams_that_overflow_affect_no_other_request_under_the_v2_runner() -> None:
    chosen = "float32 and (infinite or generates)"
    run_tests("-p", "tests.support.interpreted", str(FILE), "-k", chosen, timeout=1200)
