# SPDX-License-Identifier: Apache-2.0
"""Architectures without CPU kernels in upstream: compared on a GPU only."""

from typing import Any

from torch import nn

from tests.parity.cases import GENTLE, TOKENS, Case, case, common
from tests.parity.needs import CUTLASS, DEEP_GEMM
from tests.parity.recipe import Point, Recipe, Spot, named
from tests.parity.twins import Twin

LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
# All tokens and all experts are chosen: in bfloat16 a choice may depend on rounding.
INDEXED = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 32}
GATED = {
    "num_hidden_layers": 2,
    "intermediate_size": 256,  # enough summands for bfloat16's errors to average out
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
KIMI = {
    **LATENT,
    "q_lora_rank": None,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_head_dim": 128,
    "linear_num_heads": 2,
    "num_experts": 4,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "num_expert_group": 1,
    "topk_group": 1,
}
DBRX = {
    **TOKENS,
    "d_model": 64,
    "n_heads": 2,
    "n_layers": 3,
    "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "ffn_config": {
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "moe_num_experts": 4,
        "moe_top_k": 2,
    },
}


def sized(**options: Any) -> dict[str, Any]:
    """The common sizes, for a model whose heads have several widths."""
    sizes = common()
    del sizes["head_dim"]
    return sizes | options


def hybrid_points(layer: nn.Module, recipe: Recipe) -> dict[str, Point] | None:
    """Olmo-Hybrid normalizes after attention, and before linear attention."""
    if named(layer, ("linear_attn",)) is None:
        return None
    attention, mlp = named(layer, ("linear_attn",)), named(layer, ("mlp",))
    middle = named(layer, ("post_attention_layernorm",))
    assert attention and mlp and middle
    entering, leaving = Spot(mlp, "in"), Spot(mlp, "out")
    return recipe.ends(layer) | {
        "post_attn": Point(Spot(middle, "in"), Spot(attention, "out")),
        "mlp_in": Point(entering, entering),
        "mlp_out": Point(leaving, leaving),
    }


CASES = [
    Case(
        architecture="LongcatFlashForCausalLM",
        model_type="longcat_flash",
        options=sized(
            **LATENT,
            # Upstream's kernel of identity experts processes 256 columns at a time and
            # drops the remainder.
            hidden_size=512,
            num_layers=2,  # blocks, with two attentions each
            num_hidden_layers=4,
            ffn_hidden_size=256,
            expert_ffn_hidden_size=64,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=6,
        ),
        recipe=Recipe(
            attention=("self_attn.0",), middle=("post_attention_layernorm.0",), mlp=()
        ),
        # Entries of published configurations that the library assumes. Its identity
        # experts have weights in a checkpoint that the library saves.
        twin=Twin(
            options={
                "mla_scale_q_lora": True,
                "mla_scale_kv_lora": True,
                "zero_expert_type": "identity",
                # Some releases of the library that upstream accepts do not map this
                # name to `expert_ffn_hidden_size`.
                "moe_intermediate_size": 64,
            },
            unread=("mlp.experts.4.", "mlp.experts.5."),
        ),
        dtype="bfloat16",
        scale=GENTLE,
        cannot="identity experts have no kernel on a CPU",
    ),
    Case(
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        options=sized(**KIMI),
        # The same in the form of published configurations; and the library saves a
        # dense MLP as if it were experts.
        twin=Twin(
            options={
                "mla_use_nope": True,
                "first_k_dense_replace": 1,
                "linear_attn_config": {
                    "kda_layers": [1],
                    "full_attn_layers": [2],
                    "num_heads": 2,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                },
            },
            rename=(("layers.0.block_sparse_moe", "layers.0.mlp"),),
        ),
        dtype="bfloat16",
        scale=GENTLE,
        cannot="its delta attention has no kernel on a CPU",
        needs=(CUTLASS,),
    ),
    Case(
        architecture="DbrxForCausalLM",
        model_type="dbrx",
        options=DBRX,
        recipe=Recipe(
            layers="transformer.blocks",
            attention=("norm_attn_norm.attn",),
            middle=("norm_attn_norm.norm_2",),
        ),
        # Upstream's loader looks for the experts' weights under names that its modules
        # no longer have. With these names it finds them.
        twin=Twin(
            rename=(("ffn.experts.mlp", "ffn.experts.routed_experts.mlp"),),
        ),
    ),
    case(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        recipe=Recipe(
            attention=("post_attention_layernorm",),
            middle=("mlp",),
            own=hybrid_points,
        ),
        dtype="bfloat16",
        scale=GENTLE,
        cannot="its gated delta net has no kernel on a CPU",
        never="upstream's loader knows its norms under other names than the library"
        " saves, and its three convolutions not at all: they come as parts of one, and"
        " it is not told which part",
        **GATED,
    ),
    *(
        Case(
            architecture=architecture,
            model_type=model_type,
            options=sized(**LATENT, **ROUTED, **INDEXED, **options),
            dtype="bfloat16",
            scale=GENTLE,
            cannot="sparse attention with an indexer has no kernel on a CPU",
            needs=(DEEP_GEMM,),
        )
        for architecture, model_type, options in [
            ("DeepseekV32ForCausalLM", "deepseek_v32", {"n_group": 1, "topk_group": 1}),
            ("GlmMoeDsaForCausalLM", "glm_moe_dsa", {}),
        ]
    ),
]
