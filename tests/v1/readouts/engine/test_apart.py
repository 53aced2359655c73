# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_stop_when_under_the_v2_runner() -> None:
    chosen = "async and (first_token or comes_late)"
    # Under Triton's interpreter, which must be chosen before vllm is imported.
    file = "tests/v1/readouts/engine/test_stop_when.py"
    run_tests("-p", "tests.support.interpreted", "-k", chosen, file)
