# SPDX-License-Identifier: Apache-2.0
"""Architectures that upstream runs through the library's modules."""

from typing import Any

from tests.parity.cases import TOKENS, Case, case
from tests.parity.families.llama import LLAMA3, WINDOWED
from tests.parity.recipe import PARALLEL, PLAIN, POST_NORM, SANDWICH, Recipe

NEOX = {"num_attention_heads": 2}
BIGCODE = {**TOKENS, "n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 128}


def over(
    architecture: str, model_type: str, recipe: Recipe = PLAIN, **options: Any
) -> Case:
    """A case of upstream's own architecture, run by the backend instead."""
    return case(
        architecture,
        model_type,
        "Transformers backend",
        recipe=recipe,
        engine={"model_impl": "transformers"},
        **options,
    )


CASES = [
    over("LlamaForCausalLM", "llama"),
    over("Qwen3ForCausalLM", "qwen3"),
    over("MixtralForCausalLM", "mixtral", num_local_experts=4, sliding_window=None),
    over(
        "Gemma2ForCausalLM",
        "gemma2",
        SANDWICH,
        sliding_window=16,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
    ),
    over("CohereForCausalLM", "cohere", PARALLEL, tie_word_embeddings=True),
    case("ArceeForCausalLM", "arcee"),
    case("ArceeForCausalLM", "arcee", "bias", attention_bias=True, mlp_bias=True),
    case(
        "CwmForCausalLM",
        "cwm",
        rope_parameters=LLAMA3,
        sliding_window=16,
        layer_types=WINDOWED,
    ),
    case(
        "FlexOlmoForCausalLM",
        "flex_olmo",
        recipe=Recipe(attention=("post_attention_layernorm",), middle=("mlp",)),
        num_experts=4,
        num_experts_per_tok=2,
    ),
    case("GlmForCausalLM", "glm", head_dim=64, hidden_size=128),
    Case(
        architecture="GPTBigCodeForCausalLM",
        model_type="gpt_bigcode",
        options=BIGCODE,
        recipe=Recipe(layers="transformer.h"),
    ),
    case(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        recipe=Recipe(layers="gpt_neox.layers", middle=()),
        use_parallel_residual=True,
        num_key_value_heads=2,
    ),
    case(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "sequential",
        representative=True,
        recipe=Recipe(layers="gpt_neox.layers"),
        use_parallel_residual=False,
        num_key_value_heads=2,
    ),
    case("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    case("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=4, moe_topk=2),
    case("Jais2ForCausalLM", "jais2"),
    case(
        "MellumForCausalLM",
        "mellum",
        layer_types=WINDOWED,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        mlp_layer_types=["sparse"] * 3,
    ),
    case("OlmoForCausalLM", "olmo"),
    case("OlmoForCausalLM", "olmo", "clipped", clip_qkv=0.5),
    case("Olmo2ForCausalLM", "olmo2", recipe=POST_NORM),
    case(
        "Olmo3ForCausalLM",
        "olmo3",
        recipe=POST_NORM,
        layer_types=WINDOWED,
        sliding_window=16,
    ),
    case("PhiForCausalLM", "phi", recipe=Recipe(middle=())),
    case("SeedOssForCausalLM", "seed_oss"),
    case("SmolLM3ForCausalLM", "smollm3", no_rope_layers=[1, 0, 1]),
    case("Starcoder2ForCausalLM", "starcoder2", sliding_window=None),
    case(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        recipe=Recipe(middle=("pre_feedforward_layernorm",)),
        layer_types=WINDOWED,
        sliding_window=16,
        query_pre_attn_scalar=32,
    ),
]
