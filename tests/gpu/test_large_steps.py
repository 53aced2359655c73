# SPDX-License-Identifier: Apache-2.0
"""Rows of large steps, which are copied to the host while later layers are computed."""

from pathlib import Path

import pytest

from tests.gpu.conftest import BF16, OpenEngine
from tests.support.captured import asking, prompt
from tests.support.hf_reference import Reference
from vllm.model_executor.layers.residual.capture_op import CaptureProgress
from vllm.v1.capture.worker import worker

pytestmark = pytest.mark.gpu

LENGTHS = (900, 700, 1500, 33)


def test_rows_that_leave_during_the_pass_are_those_that_leave_after_it(
    llama: Path,
    reference: Reference,
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(
        llama, reference=reference, max_model_len=2048, max_num_batched_tokens=4096
    )
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    followed: list[int] = []
    launched = CaptureProgress.launched

    def follow(progress: CaptureProgress, address: int) -> None:
        launched(progress, address)
        followed.append(len(progress.parts))

    monkeypatch.setattr(CaptureProgress, "launched", follow)
    found = []
    for parts in (worker.LARGE_STEP_PARTS, 1, worker.LARGE_STEP_PARTS):
        monkeypatch.setattr(worker, "LARGE_STEP_PARTS", parts)
        outputs = engine.run(prompts, asking("all_prompt", max_tokens=1))
        assert max(followed) == min(parts, 6)  # 12 taps in parts of equal size
        followed.clear()
        found.append([engine.rows(output) for output in outputs])
        for output in outputs:
            fed = range(len(output.prompt_token_ids or ()))
            engine.check(output, fed, tolerance=BF16)
    for number in range(len(LENGTHS)):
        during, after, again = (rows[number] for rows in found)
        for tap, expected in after.items():
            assert during[tap].equal(expected) and again[tap].equal(expected), tap
