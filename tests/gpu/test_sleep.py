# SPDX-License-Identifier: Apache-2.0
"""An engine captures, steers and reads out after sleep as before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import OpenEngine
from tests.support.captured import CapturedEngine, asking, prompt
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = pytest.mark.gpu

WIDTH = 512
PROMPTS = [prompt(100, seed=9), prompt(40, seed=10)]


def vector(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def own(seed: int) -> dict[str, Any]:
    """A request's own vectors and program."""
    clamped = {"vector": vector(seed + 1), "op": "clamp", "min": -1, "max": 1}
    return {"post_block": {1: vector(seed), 2: clamped}}


def taken(engine: CapturedEngine) -> list[Any]:
    """Tokens and rows of steered requests, in graphs."""
    params = [
        asking("all", max_tokens=12, detokenize=False, steering_vectors=own(seed))
        for seed in (1, 2)
    ]
    found: list[Any] = []
    for output in engine.run(PROMPTS, params):
        found.append(list(output.outputs[0].token_ids))
        found += [rows for _, rows in sorted(engine.rows(output).items())]
    return found


def test_sleep_keeps_what_steers_and_captures(
    llama: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(llama, enable_sleep_mode=True, enable_prefix_caching=False)
    llm = engine.llm
    llm.set_steering({"pre_attn": {0: vector(7), 3: vector(8)}})
    before = taken(engine)
    for level in (1, 2):
        free = torch.cuda.mem_get_info()[0]
        llm.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] > free
        with pytest.raises(SteeringValidationError, match="wake it up first"):
            llm.set_steering({"pre_attn": {0: vector(9)}})
        if level == 1:
            llm.wake_up()
        else:
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            # The tables are restored before the KV cache is.
            llm.set_steering({"pre_attn": {0: vector(9)}})
            llm.set_steering({"pre_attn": {0: vector(7)}})
            llm.wake_up(tags=["kv_cache"])
        for one, other in zip(before, taken(engine), strict=True):
            same = torch.equal(one, other) if torch.is_tensor(one) else one == other
            assert same, f"level {level}"
