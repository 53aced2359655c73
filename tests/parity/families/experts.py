# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts."""

from typing import Any

from tests.parity.cases import Case, case, common
from tests.parity.families.llama import MULTIPLIERS, WINDOWED
from tests.parity.recipe import SCALED, Recipe
from tests.parity.twins import Twin

EXPERTS = ("block_sparse_moe",)
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIGMOID = "the router of a CPU knows sigmoid scores in groups only"
CORRECTION = ("e_score_correction_bias",)
DROPPED = (
    "upstream's loader drops the correction bias of the router: it looks for it among"
    " the weights of the experts, and goes on without"
)
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
}


def laguna(
    variant: str = "plain",
    cannot: str = "",
    never: str = "",
    zeros: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    sizes = common(
        layer_types=WINDOWED,
        sliding_window=16,
        num_attention_heads_per_layer=[2, 2, 2],
        shared_expert_intermediate_size=64,
        mlp_layer_types=["dense", "sparse", "sparse"],
        **SPARSE,
    )
    return Case(
        architecture="LagunaForCausalLM",
        model_type="laguna",
        variant=variant,
        options=sizes | options,
        cannot=cannot,
        never=never,
        zeros=zeros,
    )


CASES = [
    case(
        "MixtralForCausalLM",
        "mixtral",
        representative=True,
        sliding_window=None,
        **LOCAL,
    ),
    case("MixtralForCausalLM", "mixtral", "window", sliding_window=16, **LOCAL),
    case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        shared_expert_intermediate_size=64,
        **SPARSE,
    ),
    case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        "dense layers",
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        **SPARSE,
    ),
    case("Qwen3MoeForCausalLM", "qwen3_moe", **SPARSE),
    case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "dense layers",
        mlp_only_layers=[0],
        norm_topk_prob=True,
        **SPARSE,
    ),
    case("OlmoeForCausalLM", "olmoe", num_experts=4, num_experts_per_tok=2),
    case(
        "OlmoeForCausalLM",
        "olmoe",
        "multi-head",
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
    ),
    case("PhiMoEForCausalLM", "phimoe", attention_bias=True, **LOCAL),
    case("GraniteMoeForCausalLM", "granitemoe", recipe=SCALED, **LOCAL, **MULTIPLIERS),
    case(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        recipe=Recipe(
            scale=SCALED.scale,
            mlp=EXPERTS,
            shared=("shared_mlp",),
            mlp_in=("post_attention_layernorm",),
        ),
        shared_intermediate_size=64,
        **LOCAL,
        **MULTIPLIERS,
    ),
    case(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        recipe=SCALED,
        sliding_window=16,
        layer_types=WINDOWED,
        **LOCAL,
        **MULTIPLIERS,
    ),
    case("Glm4MoeForCausalLM", "glm4_moe", first_k_dense_replace=1, **ROUTED),
    case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        "qk-norm",
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        **ROUTED,
    ),
    case(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        zeros=CORRECTION,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
    ),
    *(
        case(
            architecture,
            "exaone_moe",
            sliding_window=16,
            layer_types=WINDOWED,
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_shared_experts=1,
            n_group=2,
            topk_group=1,
            **SPARSE | {"num_experts": 8},
        )
        for architecture in ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
    ),
    case(
        "HYV3ForCausalLM",
        "hy_v3",
        twin=Twin(
            options={
                "first_k_dense_replace": 1,
                "expert_hidden_dim": 64,
                "route_norm": True,
                "qk_norm": True,
            }
        ),
        num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        **SPARSE,
    ),
    case(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        cannot=SIGMOID,
        twin=Twin(
            options={
                "rotary_dim": 32,
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
            }
        ),
        **LOCAL,
    ),
    case(
        "GptOssForCausalLM",
        "gpt_oss",
        layer_types=WINDOWED,
        sliding_window=16,
        **LOCAL,
    ),
    case(
        "Llama4ForCausalLM",
        "llama4_text",
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        num_hidden_layers=4,
        attention_chunk_size=128,
        attn_temperature_tuning=False,
    ),
    laguna(cannot=SIGMOID, zeros=CORRECTION),
    laguna("correction bias", never=DROPPED),
    laguna("dense", mlp_layer_types=["dense"] * 3),
    *(
        case(
            architecture,
            "mimo_v2_flash",
            twin=Twin(
                options={
                    "hybrid_layer_pattern": [1, 0, 1],
                    "moe_layer_freq": [0, 1, 1],
                    "layernorm_epsilon": 1e-5,
                    "swa_num_attention_heads": 2,
                    "swa_num_key_value_heads": 2,
                    "add_swa_attention_sink_bias": True,
                    "swa_head_dim": 32,
                    "swa_v_head_dim": 32,
                    "v_head_dim": 32,
                    "sliding_window_size": 16,
                    "rope_theta": 10000.0,
                    "swa_rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "attention_value_scale": 0.707,
                }
            ),
            v_head_dim=32,
            rope_parameters={
                kind: {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                }
                for kind in ("full_attention", "sliding_attention")
            },
            layer_types=WINDOWED,
            sliding_window=16,
            mlp_layer_types=["dense", "sparse", "sparse"],
            **ROUTED,
        )
        for architecture in ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
    ),
    case(
        "AfmoeForCausalLM",
        "afmoe",
        recipe=Recipe(
            attention=("post_attention_layernorm",), middle=("pre_mlp_layernorm",)
        ),
        twin=Twin(
            options={
                "score_func": "sigmoid",
                "route_norm": True,
                "n_group": 1,
                "topk_group": 1,
            }
        ),
        num_shared_experts=1,
        num_dense_layers=1,
        layer_types=WINDOWED,
        sliding_window=16,
        **SPARSE,
    ),
]
