# SPDX-License-Identifier: Apache-2.0
"""Pre-norm decoders: norm, attention, add, norm, MLP, add."""

from typing import Any

from tests.parity.cases import TOKENS, Case, case, common
from tests.parity.recipe import SCALED, Recipe
from tests.parity.substitutes import XIELU

GPT2 = {
    **TOKENS,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 128,
}
OPT = {
    **TOKENS,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MULTIPLIERS = {
    "residual_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]


def llama(variant: str, **options: Any) -> Case:
    return case("LlamaForCausalLM", "llama", variant, **options)


def qwen(architecture: str, model_type: str) -> list[Case]:
    return [
        case(architecture, model_type, "plain"),
        case(architecture, model_type, "tied", tie_word_embeddings=True),
    ]


CASES = [
    case("LlamaForCausalLM", "llama", representative=True),
    case("LlamaForCausalLM", "llama", dtype="bfloat16", scale=0.1, representative=True),
    llama("bias", attention_bias=True, mlp_bias=True),
    llama("tied", tie_word_embeddings=True),
    llama("multi-head", num_key_value_heads=2),
    llama("llama3 rope", rope_parameters=LLAMA3),
    llama("yarn rope", rope_parameters=YARN),
    case("MistralForCausalLM", "mistral", "plain", sliding_window=None),
    case("MistralForCausalLM", "mistral", "window", sliding_window=16),
    case(
        "Ministral3ForCausalLM",
        "ministral3",
        "plain",
        rope_parameters=YARN
        | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1},
    ),
    *qwen("Qwen2ForCausalLM", "qwen2"),
    *qwen("Qwen3ForCausalLM", "qwen3"),
    Case(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        variant="bias",
        options=common(attention_bias=True),
        zeros=("o_proj.bias",),  # upstream's has none
    ),
    case("Ernie4_5ForCausalLM", "ernie4_5", "plain"),
    case("Phi3ForCausalLM", "phi3", "plain"),
    case(
        "Phi3ForCausalLM",
        "phi3",
        "partial rope",
        num_attention_heads=2,
        head_dim=64,
        hidden_size=128,
        partial_rotary_factor=0.5,
    ),
    case("NemotronForCausalLM", "nemotron", "plain"),
    case("NemotronForCausalLM", "nemotron", "bias", attention_bias=True, mlp_bias=True),
    case("ApertusForCausalLM", "apertus", substitute=XIELU, rope_parameters=LLAMA3),
    case(
        "GraniteForCausalLM",
        "granite",
        recipe=SCALED,
        representative=True,
        **MULTIPLIERS,
    ),
    case(
        "GraniteForCausalLM",
        "granite",
        "bias",
        recipe=SCALED,
        attention_bias=True,
        mlp_bias=True,
        **MULTIPLIERS,
    ),
    case(
        "GraniteSWAForCausalLM",
        "granite_swa",
        recipe=SCALED,
        sliding_window=16,
        layer_types=WINDOWED,
        **MULTIPLIERS,
    ),
    case(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        recipe=Recipe(attention=("post_norm1",), scale=SCALED.scale),
        **MULTIPLIERS,
    ),
    case(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        "no post-norm",
        recipe=SCALED,
        use_post_norm=False,
        **MULTIPLIERS,
    ),
    Case(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        options=GPT2,
        recipe=Recipe(layers="transformer.h"),
        representative=True,
    ),
    Case(
        architecture="OPTForCausalLM",
        model_type="opt",
        options=OPT,
        recipe=Recipe(
            layers="model.decoder.layers",
            middle=("final_layer_norm",),
            mlp=("fc1",),
            mlp_out=("fc2",),
        ),
        representative=True,
    ),
    case("StableLmForCausalLM", "stablelm", representative=True),
    case("StableLmForCausalLM", "stablelm", "bias", use_qkv_bias=True),
]
