# SPDX-License-Identifier: Apache-2.0
"""Tiny models that can be split: two or four heads, four layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from tests.parity.recipe import PARALLEL, PLAIN, SANDWICH, SCALED, Recipe
from tests.support.models import VOCABULARY, save

LAYERS = 4
HIDDEN = 64


def common(**options: Any) -> dict[str, Any]:
    """The options that most configurations share, updated by `options`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | options


def _hybrid() -> transformers.PretrainedConfig:
    """Attention and Mamba-2 mixers, with a factor on each layer's addition."""
    return transformers.GraniteMoeHybridConfig(
        **common(
            num_local_experts=0,
            shared_intermediate_size=96,
            layer_types=["mamba", "attention", "mamba", "attention"],
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_chunk_size=16,
            residual_multiplier=0.4,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            logits_scaling=2.0,
        )
    )


def _post_norm() -> transformers.PretrainedConfig:
    """Norms before and behind both sublayers, windows, and soft caps."""
    return transformers.Gemma2Config(
        **common(tie_word_embeddings=True),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=16,
    )


FOUR_HEADS = {"num_attention_heads": 4, "head_dim": 32}
"""For four ranks, which have copies of two key and value heads."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that is split over ranks or stages."""

    name: str
    config: Callable[[], transformers.PretrainedConfig]
    recipe: Recipe = PLAIN
    not_in_stages: str | None = None
    """The reason why upstream cannot split its layers over stages."""

    @property
    def heads(self) -> int:
        """How many tensor-parallel ranks can divide it."""
        found: int = self.config().num_attention_heads
        return found

    def save(self, folder: Path) -> Path:
        """A checkpoint with random weights."""
        return save(self.config(), folder)


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**common(**FOUR_HEADS)),
    ),
    "post_norm": Architecture(
        "Gemma2ForCausalLM",
        _post_norm,
        SANDWICH,
    ),
    "parallel": Architecture(
        "CohereForCausalLM",
        lambda: transformers.CohereConfig(**common(tie_word_embeddings=True)),
        PARALLEL,
    ),
    "experts": Architecture(
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(
            **common(
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=None,
                **FOUR_HEADS,
            )
        ),
    ),
    "hybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _hybrid,
        replace(SCALED, mlp=("shared_mlp",), mlp_in=("post_attention_layernorm",)),
        not_in_stages="upstream's loader looks for the layers of other stages",
    ),
}
