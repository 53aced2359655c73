# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, and the V2 runner, which captures and steers like the V1 runner."""

import pytest

from tests.support.subprocess import run_tests

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1300)]

# The interpreter takes 50 ms a step: what does not depend on how the runner sees a
# batch is tested with the V1 runner only.
CHOSEN = {
    "v1/residual/test_nonfinite_streams": "float32 and generates",
    "v1/readouts/engine/test_stop_when": "async and comes_late",
    "v1/capture/engine/test_rows_rule": "async"
    " and (delivers or mix or share or chunks)",
    "v1/capture/engine/test_tight_memory": "async"
    " and (spread or turns or generated or function)",
    "v1/steering/test_engine": "llama and slots",
    "v1/steering/test_operations": "llama and (whole_prompt and matrix"
    " or decode_steering_vectors-post_attn)",
    "v1/readouts/worker/apart/test_top_tokens": "test",
    "model_executor/layers/residual/apart/test_kernel": "test",
}


def test_under_tritons_interpreter() -> None:
    # It must be chosen before vllm is imported, and the compiler has no target there,
    # although upstream's Cohere asks for one.
    files = [f"tests/{name}.py" for name in CHOSEN]
    tests = [f"{name.split('/')[-1]} and {which}" for name, which in CHOSEN.items()]
    which = " or ".join(f"({one})" for one in tests)
    plug_in = ("-p", "tests.support.interpreted")
    run_tests(*plug_in, "-k", which, *files, timeout=1200, TORCHDYNAMO_DISABLE="1")


def test_compiled_passes_and_drafts() -> None:
    # Upstream cannot start an engine on a CPU after llvmlite was loaded, which other
    # tests do. Drafts need it: their engine is the last, as it has fewer tests.
    files = ("steering/apart/test_compiled.py", "capture/engine/apart/test_drafts.py")
    run_tests(*(f"tests/v1/{name}" for name in files), timeout=1200)
