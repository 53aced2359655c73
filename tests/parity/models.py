# SPDX-License-Identifier: Apache-2.0
"""Architectures whose captured stream is compared with the Transformers library's.

One entry per architecture: a tiny configuration, and where the library keeps the
stream after attention. To add one, add an entry; the tests need no change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import nn

from tests.engines.reference import Places, decoder

VOCABULARY = 256


def gpt_layers(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h  # type: ignore[return-value, union-attr]


def opt_layers(model: nn.Module) -> nn.ModuleList:
    return model.model.decoder.layers  # type: ignore[return-value, union-attr]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A tiny model of one architecture."""

    name: str
    """Of its class in the Transformers library's and vLLM's registries."""
    config: Callable[[], transformers.PreTrainedConfig]
    places: Places = field(default_factory=lambda: Places(decoder))
    bfloat16: bool = False
    """Whether it is compared in bfloat16, too."""


def _common(**options: Any) -> dict[str, Any]:
    """Three layers, 64 wide, two heads of 32."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | options


ARCHITECTURES = [
    Architecture(
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**_common()),
        bfloat16=True,
    ),
    Architecture(
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**_common()),
    ),
    Architecture(
        "Qwen3ForCausalLM",
        lambda: transformers.Qwen3Config(**_common()),
    ),
    Architecture(
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            **_common(
                query_pre_attn_scalar=32,
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_hidden_layers=4,
            )
        ),
        Places(decoder, mid="pre_feedforward_layernorm"),
        bfloat16=True,
    ),
    Architecture(
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(
            **_common(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        ),
    ),
    Architecture(
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=3,
            n_head=2,
            n_positions=128,
            bos_token_id=1,
            eos_token_id=2,
        ),
        Places(gpt_layers, mid="ln_2", attention="attn"),
    ),
    Architecture(
        "OPTForCausalLM",
        lambda: transformers.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
            do_layer_norm_before=True,
            bos_token_id=1,
            eos_token_id=2,
        ),
        Places(opt_layers, mid="final_layer_norm"),
    ),
    Architecture(
        "GraniteForCausalLM",
        lambda: transformers.GraniteConfig(
            **_common(
                residual_multiplier=0.4,
                embedding_multiplier=3.0,
                attention_multiplier=0.2,
                logits_scaling=2.0,
            )
        ),
    ),
    # Attention and MLP side by side, on the same input.
    Architecture(
        "CohereForCausalLM",
        lambda: transformers.CohereConfig(**_common(tie_word_embeddings=True)),
        Places(decoder, mid=None),
    ),
    Architecture(
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(
            **_common(
                query_pre_attn_scalar=32, sliding_window=128, tie_word_embeddings=True
            )
        ),
        Places(decoder, mid="pre_feedforward_layernorm"),
    ),
    Architecture("Phi3ForCausalLM", lambda: transformers.Phi3Config(**_common())),
    Architecture(
        "StableLmForCausalLM", lambda: transformers.StableLmConfig(**_common())
    ),
]
