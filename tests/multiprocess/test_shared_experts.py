# SPDX-License-Identifier: Apache-2.0
"""Rows of shared experts, which two tensor-parallel ranks divide, are whole."""

from collections.abc import Iterator

import pytest

from tests.v1.capture.engine.test_inner_points import Pair
from tests.v1.capture.engine.test_shared_experts import (
    opened,
    test_additions_enter_the_projection,  # noqa: F401
    test_rows_are_those_of_the_library_in_each_layer_s_width,  # noqa: F401
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = opened(
        "qwen2_moe",
        tmp_path_factory.mktemp("shared"),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        enforce_eager=True,
    )
    yield pair
    pair.engine.close()
