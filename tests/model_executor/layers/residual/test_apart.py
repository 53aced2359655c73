# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


KERNELS = (
    "tests/model_executor/layers/residual/apart/test_kernel.py",
    "tests/v1/readouts/worker/apart/test_top_tokens.py",
)


def test_kernels_under_tritons_interpreter() -> None:
    # The interpreter must be chosen before vllm is imported.
    run_tests("-p", "tests.support.interpreted", *KERNELS, timeout=800)
