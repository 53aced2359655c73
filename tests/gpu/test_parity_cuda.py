# SPDX-License-Identifier: Apache-2.0
"""`tests/parity` on a GPU, for models that upstream cannot run on a CPU.

One call, recorded in `tests/parity/results.json`:
`PARITY_RECORD=1 python -m pytest -m gpu tests/gpu/test_parity_cuda.py`
"""

import pytest

from tests.parity.test_hook_points import (  # noqa: F401  (collected here again)
    suite,
    test_adding_at_a_point_changes_logits_alike,
    test_rows_are_those_of_the_library,
    test_the_comparison_tells_what_is_a_little_wrong,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"
