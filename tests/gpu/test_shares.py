# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks that share the tokens between layers, on several GPUs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.models import VOCABULARY, save
from tests.engines.reference import Reference, relative_error
from tests.gpu.conftest import BF16
from tests.multiprocess.shares import LAYERS, NEW_TOKENS, Order, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(1200),
]

TAPS = {
    (layer, hook)
    for layer in range(LAYERS)
    for hook in ("pre_attn", "post_attn", "post_block")
}
WIDTH = 512
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"eager": False},
    "eager": {"eager": True},
    "engines": {"eager": False, "engines": 2},
}
"""One engine of two ranks; two such engines, as upstream has it."""
Found = dict[str, Any]
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": 4,  # All: bfloat16 cannot turn the router's choice.
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def begins() -> transformers.PretrainedConfig:
    """The first layer of experts is given all tokens, by the dense one before it."""
    return transformers.DeepseekV2Config(
        **COMMON,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        # The sizes that Hopper's kernels are made for.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )


def throughout() -> transformers.PretrainedConfig:
    """The model shares its tokens before the first layer."""
    return transformers.Qwen3NextConfig(
        **COMMON,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        layer_types=["full_attention"] * LAYERS,
        num_experts=4,
        shared_expert_intermediate_size=256,
    )


KINDS = {"begins": begins, "throughout": throughout}
SHARING = {"begins": [False, True, True, True], "throughout": [True] * LAYERS}


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints in bfloat16, and what one process finds, made once."""

    folder: Path
    found: dict[str, Found] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            save(KINDS[name](), path, torch.bfloat16, scale=0.1)
        return path

    def order(self, name: str, way: str, **chosen: Any) -> Order:
        model, found = str(self.path(name)), str(self.folder / f"{name}-{way}.pt")
        return Order(model, found, WIDTH, cuda=True, **chosen)

    def whole(self, name: str) -> Found:
        if name not in self.found:
            order = self.order(name, "whole", shares=False, eager=False)
            self.found[name] = run(order)
        return self.found[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("shares"))


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


@pytest.fixture(scope="module")
def name(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def whole(models: Models, name: str) -> Found:
    return models.whole(name)


@pytest.fixture(scope="module")
def shared(models: Models, case: tuple[str, str]) -> Found:
    return run(models.order(*case, shares=True, **WAYS[case[1]]))


def test_the_layers_of_experts_share_their_tokens(
    name: str, whole: Found, shared: Found
) -> None:
    assert whole["shares"] == [[False] * LAYERS]
    assert SHARING[name] in shared["shares"]


def test_rows_are_those_of_the_library(
    models: Models, name: str, shared: Found
) -> None:
    reference = Reference(models.path(name))
    for request in shared["plain"]:
        fed = [*request["prompt"], *request["tokens"]][:-1]
        expected = reference.stream(fed)
        assert len(request["tokens"]) == NEW_TOKENS
        assert set(request["rows"]) == TAPS
        for tap, rows in request["rows"].items():
            assert relative_error(rows, expected[tap]) < BF16, tap
            assert request["positions"][tap] == list(range(len(fed)))


@pytest.mark.parametrize("kind", ["plain", "added", "operated", "alone"])
def test_shared_tokens_give_what_one_process_gives(
    whole: Found, shared: Found, kind: str
) -> None:
    """As far as both generated the same: bfloat16 may turn a close decision."""
    generated = 0
    for one, other in zip(whole[kind], shared[kind], strict=True):
        agreeing = same(one["tokens"], other["tokens"])
        generated += agreeing
        length = min(
            len(one["prompt"]) + agreeing, len(one["positions"][0, "pre_attn"])
        )
        assert other["results"] == {"keeper": ("ok", None)}
        assert relative_error(logits(other)[:1], logits(one)[:1]) < 2 * BF16
        assert one["rows"].keys() == other["rows"].keys() == TAPS
        for tap, rows in one["rows"].items():
            error = relative_error(other["rows"][tap][:length], rows[:length].float())
            assert error < 2 * BF16, (tap, error)
    assert generated >= NEW_TOKENS * len(whole[kind]) / 2


def same(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    differing = [a != b for a, b in zip(one, other, strict=True)]
    return differing.index(True) if True in differing else len(one)


@pytest.mark.parametrize("kind", ["added", "operated"])
def test_what_steers_a_request_matters(shared: Found, kind: str) -> None:
    for plain, steered in zip(shared["plain"], shared[kind], strict=True):
        assert relative_error(logits(steered)[:1], logits(plain)[:1]) > 1e-3


def logits(request: Found) -> torch.Tensor:
    return torch.tensor(request["logprobs"])
