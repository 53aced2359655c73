# SPDX-License-Identifier: Apache-2.0
"""`tests/parity` on a GPU, for models that upstream cannot run on a CPU.

One call, recorded in `tests/parity/results.json`:
`PARITY_RECORD=1 python -m pytest -m gpu tests/gpu/test_parity_cuda.py`
"""

from pathlib import Path

import pytest

from tests.parity import engine
from tests.parity.families import CASES
from tests.parity.processes import ENVIRONMENT, ON_CUDA
from tests.parity.test_hook_points import (  # noqa: F401  (collected here again)
    suite,
    test_adding_at_a_point_changes_logits_alike,
    test_rows_are_those_of_the_library,
    test_the_comparison_tells_what_is_a_little_wrong,
)
from vllm import envs

pytestmark = pytest.mark.gpu
ONE_STREAM = "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD"


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


@pytest.mark.skipif(not hasattr(envs, ONE_STREAM), reason="always one stream")
def test_layers_in_two_streams_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(one for one in CASES if one.architecture == "Cohere2MoeForCausalLM")
    monkeypatch.delenv(ONE_STREAM, raising=False)
    with pytest.raises(Exception, match=f"{ONE_STREAM}={ENVIRONMENT[ONE_STREAM]}"):
        engine.run(case, case.save(tmp_path)[1], **ON_CUDA)
