# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_kernels_under_tritons_interpreter() -> None:
    # The interpreter must be chosen before vllm is imported.
    folder = "tests/v1/readouts/worker/apart"
    run_tests("-p", "tests.support.interpreted", folder, timeout=500)
