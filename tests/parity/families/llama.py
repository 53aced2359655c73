# SPDX-License-Identifier: Apache-2.0
"""Pre-norm decoders: norm, attention, add, norm, MLP, add."""

from typing import Any

from tests.parity.cases import TOKENS, Case, common
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


def case(architecture: str, model_type: str, variant: str, **options: Any) -> Case:
    """A case that differs from the common sizes by `options`."""
    return Case(
        architecture=architecture,
        model_type=model_type,
        variant=variant,
        options=common(**options),
    )


def llama(variant: str, **options: Any) -> Case:
    return case("LlamaForCausalLM", "llama", variant, **options)


def qwen(architecture: str, model_type: str) -> list[Case]:
    return [
        case(architecture, model_type, "plain"),
        case(architecture, model_type, "tied", tie_word_embeddings=True),
    ]


CASES = [
    Case(
        architecture="LlamaForCausalLM",
        model_type="llama",
        options=common(),
        representative=True,
    ),
    Case(
        architecture="LlamaForCausalLM",
        model_type="llama",
        options=common(),
        dtype="bfloat16",
        scale=0.1,
        representative=True,
    ),
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
    Case(
        architecture="ApertusForCausalLM",
        model_type="apertus",
        options=common(rope_parameters=LLAMA3),
        substitute=XIELU,
    ),
    Case(
        architecture="GraniteForCausalLM",
        model_type="granite",
        options=common(**MULTIPLIERS),
        recipe=SCALED,
        representative=True,
    ),
    Case(
        architecture="GraniteForCausalLM",
        model_type="granite",
        variant="bias",
        options=common(attention_bias=True, mlp_bias=True, **MULTIPLIERS),
        recipe=SCALED,
    ),
    Case(
        architecture="GraniteSWAForCausalLM",
        model_type="granite_swa",
        options=common(sliding_window=16, layer_types=WINDOWED, **MULTIPLIERS),
        recipe=SCALED,
    ),
    Case(
        architecture="HyperCLOVAXForCausalLM",
        model_type="hyperclovax",
        options=common(**MULTIPLIERS),
        recipe=Recipe(attention=("post_norm1",), scale=SCALED.scale),
    ),
    Case(
        architecture="HyperCLOVAXForCausalLM",
        model_type="hyperclovax",
        variant="no post-norm",
        options=common(use_post_norm=False, **MULTIPLIERS),
        recipe=SCALED,
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
    Case(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        options=common(),
        representative=True,
    ),
    Case(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        variant="bias",
        options=common(use_qkv_bias=True),
    ),
]
