# SPDX-License-Identifier: Apache-2.0
"""State-space, linear-attention and convolution mixers, alone or with attention."""

from torch import nn

from tests.parity.cases import GENTLE, TOKENS, Case, case, common
from tests.parity.families.llama import MULTIPLIERS
from tests.parity.recipe import SCALED, Point, Recipe, Spot, named
from tests.parity.stand_ins import TORCHVISION
from tests.parity.twins import Twin

MAMBA2 = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 16,
    "tie_word_embeddings": False,
}
MAMBA = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 16,
    "intermediate_size": 128,
    "time_step_rank": 4,
}
GRANITE = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 96,
    **MULTIPLIERS,
}
FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 4,
}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 64,
    "attention_hidden_size": 128,
    "kv_channels": 32,
    "mamba_d_state": 16,
    "n_mamba_heads": 4,
    "mamba_headdim": 32,
    "chunk_size": 16,
    "adapter_rank": 8,
    "num_mem_blocks": 1,
    "use_mem_rope": True,
    "tie_word_embeddings": True,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# Upstream's choice on Hopper is FlashInfer's kernel, which need not be installed.
TRITON = {"additional_config": {"gdn_prefill_backend": "triton"}}
SPARSE = {
    # All experts are chosen: in bfloat16 a router's choice may depend on rounding.
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CONVOLUTION = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}


def attention_out(layer: nn.Module) -> float:
    """Falcon-H1's factor of the attention's contribution."""
    return float(layer.attn_out_multiplier)  # type: ignore[arg-type]


def nemotron_points(layer: nn.Module, recipe: Recipe) -> dict[str, Point]:
    """One sublayer per block: a mixer, whose sum is post_attn, or an MLP."""
    found = recipe.ends(layer)
    if layer.block_type in ("linear_attention", "full_attention"):
        return found | {"post_attn": found["post_block"]}
    mlp = named(layer, ("mixer",))
    assert mlp is not None
    entering, leaving = Spot(mlp, "in"), Spot(mlp, "out")
    return found | {
        "post_attn": found["pre_attn"],
        "mlp_in": Point(entering, entering),
        "mlp_out": Point(leaving, leaving),
    }


ROTATION = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
WRONG = (
    "on a CPU, the kernel of rotary embeddings, which is wrong for its normed queries,"
    " is off: `custom_ops` are `all` and `-rotary_embedding`"
)
SCAN = "the scan of Mamba-1 has no kernel on a CPU"
MIXER = Recipe(layers="backbone.layers", single=("mixer",))


CASES = [
    Case(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        options=MAMBA2,
        recipe=MIXER,
        representative=True,
    ),
    Case(
        architecture="MambaForCausalLM",
        model_type="mamba",
        options=MAMBA,
        recipe=MIXER,
        cannot=SCAN,
    ),
    Case(
        architecture="FalconMambaForCausalLM",
        model_type="falcon_mamba",
        cannot=SCAN,
        options=MAMBA,
        recipe=MIXER,
    ),
    case(
        "JambaForCausalLM",
        "jamba",
        cannot=SCAN,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_dt_rank=4,
    ),
    *(
        case(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            variant,
            recipe=Recipe(
                scale=SCALED.scale,
                mlp=("block_sparse_moe",) if experts else ("shared_mlp",),
                shared=("shared_mlp",) if experts else (),
                mlp_in=("post_attention_layernorm",),
            ),
            **GRANITE,
            **options,
        )
        for variant, experts, options in [
            ("dense", False, {"num_local_experts": 0}),
            ("experts", True, {"num_local_experts": 4, "num_experts_per_tok": 2}),
            (
                "rope",
                False,
                {"num_local_experts": 0, "position_embedding_type": "rope"},
            ),
        ]
    ),
    case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        recipe=Recipe(attention=("self_attn",), scale=attention_out),
        **FALCON_H1,
    ),
    case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        "multipliers",
        recipe=Recipe(attention=("self_attn",), scale=attention_out),
        **FALCON_H1,
        attention_out_multiplier=0.5,
        attention_in_multiplier=0.7,
        ssm_out_multiplier=0.6,
        ssm_in_multiplier=1.3,
        mlp_multipliers=[0.8, 0.9],
        key_multiplier=0.7,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
    ),
    *(
        case(
            architecture,
            "nemotron_h",
            variant,
            recipe=Recipe(own=nemotron_points),
            cannot="experts without a gate have no kernel on a CPU"
            if "moe" in blocks
            else "",
            **NEMOTRON,
            layers_block_type=blocks,
            num_hidden_layers=len(blocks),
        )
        for architecture in ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
        for variant, blocks in [
            ("plain", ["mamba", "mlp", "attention", "mlp"]),
            ("experts", ["mamba", "moe", "attention", "moe"]),
        ]
    ),
    *(
        Case(
            architecture="Zamba2ForCausalLM",
            model_type="zamba2",
            variant=variant,
            options=common(**ZAMBA | {"num_mem_blocks": blocks}),
            recipe=Recipe(single=("mamba", "mamba_decoder")),
            # With larger weights the attention of its blocks is so sharp that the
            # library's own float32 is 6e-5 from its float64.
            scale=0.1,
        )
        for variant, blocks in [("plain", 1), ("two shared blocks", 2)]
    ),
    case(
        "Lfm2ForCausalLM",
        "lfm2",
        twin=Twin(options={"conv_dim": 64, "block_dim": 64, "block_ff_dim": 96}),
        on_cpu=ROTATION,
        note=WRONG,
        **CONVOLUTION,
    ),
    case(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        on_cpu=ROTATION,
        note=WRONG,
        **CONVOLUTION,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    *(
        case(
            architecture,
            model_type,
            dtype="bfloat16",
            scale=GENTLE,
            seed=seed,
            stand_ins=stand_ins,
            engine=TRITON,
            **LINEAR,
            **options,
        )
        for architecture, model_type, options, seed, stand_ins in [
            ("Qwen3NextForCausalLM", "qwen3_next", SPARSE, 0, ()),
            ("Qwen3_5ForCausalLM", "qwen3_5_text", {}, 1, TORCHVISION),
            ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", SPARSE, 0, TORCHVISION),
        ]
    ),
]
