# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = "tests/v1/capture/engine"


@pytest.mark.multiprocess
def test_drafts_that_are_known_on_the_device_only() -> None:
    file = f"{HERE}/apart/test_drafts_ahead.py"
    run_tests("-p", "tests.support.interpreted", file, timeout=1200)


@pytest.mark.soak
def test_the_v2_runners_cache_and_ends() -> None:
    files = [f"{HERE}/test_{name}.py" for name in ("prefix_cache", "ends")]
    run_tests("-p", "tests.support.interpreted", "-k", "async", *files)
