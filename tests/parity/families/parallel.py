# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP in parallel, on the same stream."""

from tests.parity.cases import TOKENS, Case, case
from tests.parity.families.llama import WINDOWED
from tests.parity.recipe import PARALLEL, Recipe

GPTJ = {
    **TOKENS,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 128,
    "rotary_dim": 16,
    "tie_word_embeddings": False,
}
FALCON = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "ffn_hidden_size": 256,  # upstream uses four times the width
    "max_position_embeddings": 128,
}
FALCON_PARALLEL = Recipe(layers="transformer.h", middle=())


def falcon(variant: str, recipe: Recipe = FALCON_PARALLEL, **options: object) -> Case:
    return Case(
        architecture="FalconForCausalLM",
        model_type="falcon",
        variant=variant,
        options=FALCON | options,
        recipe=recipe,
    )


CASES = [
    case(
        "CohereForCausalLM",
        "cohere",
        recipe=PARALLEL,
        representative=True,
        tie_word_embeddings=True,
    ),
    case(
        "CohereForCausalLM",
        "cohere",
        "qk-norm",
        recipe=PARALLEL,
        tie_word_embeddings=True,
        use_qk_norm=True,
    ),
    # Upstream's window is one token wider than the library's; no prompt reaches it.
    case(
        "Cohere2ForCausalLM",
        "cohere2",
        recipe=PARALLEL,
        tie_word_embeddings=True,
        sliding_window=128,
        layer_types=WINDOWED,
    ),
    case(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        recipe=PARALLEL,
        tie_word_embeddings=True,
        sliding_window=128,
        layer_types=WINDOWED,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_experts=4,
    ),
    case(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        "shared expert",
        recipe=PARALLEL,
        tie_word_embeddings=True,
        sliding_window=128,
        layer_types=WINDOWED,
        mlp_layer_types=["sparse"] * 3,
        num_experts=4,
        num_shared_experts=1,
    ),
    falcon("multi-query"),
    falcon("multi-head", multi_query=False),
    falcon("new, two norms", new_decoder_architecture=True, num_kv_heads=1),
    falcon(
        "new, one norm",
        new_decoder_architecture=True,
        num_kv_heads=1,
        num_ln_in_parallel_attn=1,
    ),
    falcon(
        "sequential",
        Recipe(layers="transformer.h"),
        parallel_attn=False,
        multi_query=False,
        bias=True,
    ),
    Case(
        architecture="GPTJForCausalLM",
        model_type="gptj",
        options=GPTJ,
        recipe=Recipe(layers="transformer.h", middle=()),
    ),
]
