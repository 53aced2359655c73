# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the tokens between layers give what one process gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.models import VOCABULARY, save
from tests.engines.reference import Reference, relative_error
from tests.multiprocess.shares import HIDDEN, LAYERS, Order, run
from tests.parity.families.llama import YARN

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

HOOKS = ("pre_attn", "post_attn", "post_block")
TAPS = {(layer, hook) for layer in range(LAYERS) for hook in HOOKS}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V2 of one dense layer and three of experts."""
    config = transformers.DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        # Upstream's latent attention on a CPU knows one size, and scaled rotations.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return save(config, tmp_path_factory.mktemp("shares") / "model")


@pytest.fixture(scope="module")
def whole(model: Path) -> Found:
    return run(Order(str(model), f"{model}-one.pt", shares=False))


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def shared(model: Path, request: pytest.FixtureRequest) -> Found:
    runner = request.param
    return run(Order(str(model), f"{model}-{runner}.pt", shares=True, runner=runner))


def test_the_layers_of_experts_share_their_tokens(whole: Found, shared: Found) -> None:
    assert whole["shares"] == [False] * LAYERS
    assert shared["shares"] == [False, True, True, True]


def test_rows_are_those_of_the_library(model: Path, shared: Found) -> None:
    reference = Reference(model)
    for request in shared["plain"]:
        fed = [*request["prompt"], *request["tokens"]][:-1]
        expected = reference.stream(fed)
        assert set(request["rows"]) == TAPS
        for tap, rows in request["rows"].items():
            assert relative_error(rows, expected[tap]) < 1e-4, tap
            assert request["sidecars"][tap]["positions"] == list(range(len(fed)))


@pytest.mark.parametrize("kind", ["plain", "added", "operated"])
def test_shared_tokens_give_what_one_process_gives(
    whole: Found, shared: Found, kind: str
) -> None:
    for one, other in zip(whole[kind], shared[kind], strict=True):
        assert one["tokens"] == other["tokens"]
        assert relative_error(logits(other), logits(one)) < 1e-4
        assert one["rows"].keys() == other["rows"].keys() == TAPS
        for tap, rows in one["rows"].items():
            assert relative_error(other["rows"][tap], rows) < 1e-4, tap


@pytest.mark.parametrize("kind", ["added", "operated"])
def test_what_steers_a_request_matters(shared: Found, kind: str) -> None:
    for plain, steered in zip(shared["plain"], shared[kind], strict=True):
        assert relative_error(logits(steered)[:1], logits(plain)[:1]) > 1e-3


def logits(request: Found) -> torch.Tensor:
    return torch.tensor(request["logprobs"])
