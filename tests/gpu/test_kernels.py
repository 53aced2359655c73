# SPDX-License-Identifier: Apache-2.0
"""On a GPU, the kernels that other tests interpret."""

import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_kernels_are_those_of_float64() -> None:
    run_tests(
        "tests/model_executor/layers/residual/apart",
        "tests/v1/readouts/worker/apart",
    )
