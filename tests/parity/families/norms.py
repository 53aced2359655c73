# SPDX-License-Identifier: Apache-2.0
"""Decoders with norms after the branches, and with the stream itself normed."""

from typing import Any

from torch import nn

from tests.parity.cases import TOKENS, Case, case
from tests.parity.families.llama import OPT, WINDOWED
from tests.parity.recipe import POST_NORM, SANDWICH, Point, Recipe, Spot, named
from tests.parity.substitutes import EXACT_GELU, NO_LAYER_TABLE

GEMMA = {"query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"}
BLOOM = {
    **TOKENS,
    "hidden_size": 64,
    "n_layer": 3,
    "n_head": 2,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}


def bloom_points(layer: nn.Module, recipe: Recipe) -> dict[str, Point]:
    """Both branches of Bloom return the sum of the stream and themselves."""
    found = recipe.ends(layer)
    attention = named(layer, ("self_attention",))
    middle = named(layer, ("post_attention_layernorm",))
    mlp = named(layer, ("mlp",))
    assert attention and middle and mlp
    entering, leaving = Spot(mlp, "in"), Spot(mlp, "out")
    return found | {
        "post_attn": Point(Spot(middle, "in"), Spot(attention, "out")),
        "mlp_in": Point(entering, entering),
        "mlp_out": Point(
            leaving,
            leaving,
            minus="mlp_in"
            if layer.apply_residual_connection_post_layernorm
            else "post_attn",
        ),
    }


def opt_points(layer: nn.Module, recipe: Recipe) -> dict[str, Point]:
    """Post-norm OPT norms the stream itself after each add."""
    found = recipe.ends(layer)
    norm = named(layer, ("self_attn_layer_norm",))
    attention, first = named(layer, ("self_attn",)), named(layer, ("fc1",))
    last = named(layer, ("fc2",))
    assert norm and attention and first and last
    entering, leaving = Spot(first, "in"), Spot(last, "out")
    return found | {
        "post_attn": Point(Spot(norm, "in"), Spot(attention, "out")),
        "mlp_in": Point(entering, entering),
        "mlp_out": Point(leaving, leaving),
    }


def sandwich(
    architecture: str, model_type: str, variant: str = "plain", **options: Any
) -> Case:
    return case(architecture, model_type, variant, recipe=SANDWICH, **options)


def gemma3n_points(layer: nn.Module, recipe: Recipe) -> dict[str, Point]:
    """Four streams `[4, 1, tokens, width]` enter and leave a block of Gemma 3n."""
    mlp = named(layer, ("mlp",))
    assert mlp is not None
    spots = {
        "streams_pre": Spot(layer, "in", axis=0),
        "mlp_in": Spot(mlp, "in"),
        "mlp_out": Spot(mlp, "out"),
        "streams_post": Spot(layer, "out", axis=0),
    }
    return {hook: Point(spot, spot) for hook, spot in spots.items()}


CASES = [
    case(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        recipe=Recipe(own=gemma3n_points),
        zeros=("embed_tokens_per_layer",),
        substitute=NO_LAYER_TABLE,
        representative=True,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        num_kv_shared_layers=2,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=256,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        tie_word_embeddings=True,
    ),
    case(
        "GemmaForCausalLM",
        "gemma",
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
    ),
    case(
        "Gemma2ForCausalLM",
        "gemma2",
        recipe=SANDWICH,
        representative=True,
        sliding_window=128,
        tie_word_embeddings=True,
        **GEMMA,
    ),
    sandwich(
        "Gemma2ForCausalLM",
        "gemma2",
        "no caps",
        sliding_window=16,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
        **GEMMA,
    ),
    case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        recipe=SANDWICH,
        representative=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        **GEMMA,
    ),
    case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        recipe=SANDWICH,
        dtype="bfloat16",
        scale=0.1,
        sliding_window=16,
        layer_types=WINDOWED,
        **GEMMA,
    ),
    sandwich("Gemma4ForCausalLM", "gemma4_text", **GEMMA4),
    sandwich(
        "Gemma4ForCausalLM",
        "gemma4_text",
        "per-layer embeddings",
        **GEMMA4 | {"hidden_size_per_layer_input": 32},
    ),
    sandwich(
        "Gemma4ForCausalLM",
        "gemma4_text",
        "keys are values",
        **GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    sandwich(
        "Gemma4ForCausalLM",
        "gemma4_text",
        "experts",
        **GEMMA4,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    case(
        "Glm4ForCausalLM",
        "glm4",
        recipe=Recipe(
            attention=("post_self_attn_layernorm",),
            middle=("post_attention_layernorm",),
        ),
        head_dim=64,
        hidden_size=128,
    ),
    case(
        "Exaone4ForCausalLM",
        "exaone4",
        recipe=POST_NORM,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
    ),
    case(
        "Exaone4ForCausalLM",
        "exaone4",
        "window",
        recipe=POST_NORM,
        sliding_window=16,
        sliding_window_pattern=2,
        layer_types=WINDOWED,
    ),
    Case(
        architecture="BloomForCausalLM",
        model_type="bloom",
        options=BLOOM,
        recipe=Recipe(layers="transformer.h", own=bloom_points),
        substitute=EXACT_GELU,
    ),
    Case(
        architecture="BloomForCausalLM",
        model_type="bloom",
        variant="residual after norm",
        options=BLOOM | {"apply_residual_connection_post_layernorm": True},
        recipe=Recipe(layers="transformer.h", own=bloom_points, sums=False),
        substitute=EXACT_GELU,
    ),
    Case(
        architecture="OPTForCausalLM",
        model_type="opt",
        variant="post-norm",
        options=OPT | {"do_layer_norm_before": False},
        recipe=Recipe(layers="model.decoder.layers", own=opt_points, sums=False),
    ),
]
