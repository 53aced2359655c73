# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_kernel_under_tritons_interpreter() -> None:
    # The interpreter must be chosen before vllm is imported.
    file = "tests/model_executor/layers/residual/apart/test_kernel.py"
    run_tests("-p", "tests.support.interpreted", file, timeout=800)
