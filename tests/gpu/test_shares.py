# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks that split tokens between layers, on several GPUs.

The counterpart of `tests/multiprocess/test_shares.py` for GPUs, in bfloat16.
"""

from typing import Any

import pytest
import torch
import transformers

from tests.gpu.conftest import BF16
from tests.multiprocess.shares import LAYERS
from tests.multiprocess.test_shares import (  # noqa: F401  (collected here again)
    COMMON,
    Bounds,
    Kind,
    Models,
    name,
    shared,
    test_rows_are_those_of_the_library,
    test_shared_tokens_give_what_one_process_gives,
    test_the_layers_of_experts_share_their_tokens,
    test_what_steers_a_request_matters,
    whole,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(1200),
]

WIDTH = 512
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"eager": False},
    "eager": {"eager": True},
    "engines": {"eager": False, "engines": 2},
}
# Memory is not measured, so that other processes may share the GPUs.
MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
SIZES: dict[str, Any] = COMMON | {
    "hidden_size": WIDTH,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,  # All: bfloat16 cannot turn the router's choice.
}


def begins() -> transformers.PretrainedConfig:
    """The first layer of experts receives all tokens from the dense layer before it."""
    return transformers.DeepseekV2Config(
        **SIZES | {"num_attention_heads": 16, "num_key_value_heads": 16},
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        # The sizes that Hopper's kernels support.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )


def throughout() -> transformers.PretrainedConfig:
    """The model splits its tokens before the first layer."""
    return transformers.Qwen3NextConfig(
        **SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4},
        head_dim=64,
        layer_types=["full_attention"] * LAYERS,
        num_experts=4,
        shared_expert_intermediate_size=256,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(
        tmp_path_factory.mktemp("shares"),
        {"begins": Kind(begins, MEMORY), "throughout": Kind(throughout, MEMORY)},
        WAYS,
        WIDTH,
        Bounds(rows=BF16, together=2 * BF16, exact=False),
        torch.bfloat16,
        cuda=True,
    )


@pytest.fixture(
    scope="module",
    params=[
        ("begins", "graphs"),
        ("begins", "eager"),
        ("begins", "engines"),
        ("throughout", "graphs"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    if torch.cuda.device_count() < 2 * WAYS[chosen[1]].get("engines", 1):
        pytest.skip("two engines of two ranks need four GPUs")
    return chosen
