# SPDX-License-Identifier: Apache-2.0
"""Architectures that the library has under another name, some of them identical."""

from tests.parity.cases import TOKENS, Case, case, common
from tests.parity.recipe import SANDWICH, SCALED
from tests.parity.twins import Twin

UNBIASED = (*(f"{name}_proj.bias" for name in ("q", "k", "v", "gate", "up")),)
INTERNLM2 = Twin(
    rename=(
        ("model.embed_tokens", "model.tok_embeddings"),
        ("lm_head", "output"),
        ("self_attn.o_proj", "attention.wo"),
        ("self_attn", "attention"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ),
    fuse={"wqkv": ("q_proj", "k_proj", "v_proj")},
)
EXAONE = Twin(
    options={"activation_function": "silu", "layer_norm_epsilon": 1e-6},
    rename=(
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers", "transformer.h"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("self_attn", "attn.attention"),
        ("mlp.gate_proj", "mlp.c_fc_0"),
        ("mlp.up_proj", "mlp.c_fc_1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
    ),
)
SOLAR = Twin(options={f"bskcn_{n}": [] for n in range(1, 5)} | {"bskcn_tv": [1.0, 1.0]})
MINICPM = Twin(
    options={
        "scale_emb": 3.0,
        "scale_depth": 0.4 * 3**0.5,  # three layers: 0.4 each
        "dim_model_base": 32,  # of 64: logits are halved
        "num_experts": 0,
    }
)
BAILING_NAMES = (
    ("model.embed_tokens", "model.word_embeddings"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("self_attn", "attention"),
)
BAILING = Twin(
    options={
        "use_qkv_bias": False,
        "use_bias": False,
        "num_experts": 4,
        "num_shared_experts": 0,
        "first_k_dense_replace": 0,
        "embedding_dropout": 0.0,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "norm_topk_prob": True,
        "score_function": "softmax",
        "moe_shared_expert_intermediate_size": 64,
    },
    rename=BAILING_NAMES,
    fuse={"query_key_value": ("q_proj", "k_proj", "v_proj")},
)
CHATGLM = Twin(
    whole=True,
    options={
        "model_type": "chatglm",
        "num_layers": 3,
        "padded_vocab_size": 256,
        "vocab_size": 256,
        "hidden_size": 128,
        "ffn_hidden_size": 96,
        "kv_channels": 64,
        "num_attention_heads": 2,
        "seq_length": 128,
        "layernorm_epsilon": 1.5625e-07,
        "rmsnorm": True,
        "apply_residual_connection_post_layernorm": False,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "multi_query_attention": True,
        "multi_query_group_num": 1,
        "original_rope": True,
        "fp32_residual_connection": False,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
    rename=(
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.norm", "transformer.encoder.final_layernorm"),
        ("model.layers", "transformer.encoder.layers"),
        ("lm_head", "transformer.output_layer"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("self_attn", "self_attention"),
        ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ),
    fuse={"query_key_value": ("q_proj", "k_proj", "v_proj")},
)
# Queries, keys and values have no bias. One head: a checkpoint has the rows of keys and
# values head by head.
TELECHAT2 = Twin(
    options={
        "n_layer": 3,
        "n_head": 1,
        "ffn_hidden_size": 96,
        "layer_norm_epsilon": 1e-6,
    },
    rename=(
        ("self_attn.q_proj", "self_attention.query"),
        ("self_attn.k_proj", "self_attention.key"),
        ("self_attn.v_proj", "self_attention.value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("model.embed_tokens", "transformer.word_embeddings"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers", "transformer.h"),
    ),
    fuse={"key_value": ("key", "value")},
    unread=UNBIASED,
)
DEEPSEEK = Twin(
    options={
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "n_routed_experts": 4,
        "n_shared_experts": None,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
    },
    rename=(
        ("block_sparse_moe", "mlp"),
        ("w1.weight", "gate_proj.weight"),
        ("w2.weight", "down_proj.weight"),
        ("w3.weight", "up_proj.weight"),
    ),
)


CASES = [
    case("LLaMAForCausalLM", "llama"),
    case("InternLM3ForCausalLM", "llama"),
    case("InternLM3ForCausalLM", "llama", variant="bias", attention_bias=True),
    case("IQuestCoderForCausalLM", "llama"),
    case("TeleChat3ForCausalLM", "llama"),
    case("TeleFLMForCausalLM", "llama", twin=Twin(options={"use_mup": False})),
    case("PanguEmbeddedForCausalLM", "llama", attention_bias=True),
    case("InternLM2ForCausalLM", "llama", twin=INTERNLM2),
    case("ExaoneForCausalLM", "llama", twin=EXAONE),
    case("SolarForCausalLM", "llama", twin=SOLAR),
    case("MiMoForCausalLM", "qwen2"),
    case(
        "TeleChat2ForCausalLM",
        "llama",
        twin=TELECHAT2,
        zeros=UNBIASED,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        attention_bias=True,
        mlp_bias=True,
    ),
    case(
        "DeepseekForCausalLM",
        "mixtral",
        twin=DEEPSEEK,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    case(
        "Rnj1ForCausalLM",
        "gemma3_text",
        recipe=SANDWICH,
        cannot="attention on a CPU knows no chunks",
        layer_types=["full_attention"] * 3,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
    ),
    case(
        "OrionForCausalLM",
        "stablelm",
        twin=Twin(options={"rms_norm_eps": 1e-5}),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        partial_rotary_factor=1.0,
    ),
    case(
        "MiniCPMForCausalLM",
        "granite",
        twin=MINICPM,
        recipe=SCALED,
        residual_multiplier=0.4,
        embedding_multiplier=3.0,
        attention_multiplier=32**-0.5,
        logits_scaling=2.0,
    ),
    *(
        case(
            architecture,
            "qwen3_moe",
            twin=BAILING,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
        for architecture in (
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "SarvamMoEForCausalLM",
        )
    ),
    Case(
        architecture="ChatGLMModel",
        model_type="glm",
        options=TOKENS
        | common(hidden_size=128, head_dim=64)
        | {"partial_rotary_factor": 0.5},
        twin=CHATGLM,
    ),
    case(
        "ChatGLMForConditionalGeneration",
        "glm",
        twin=CHATGLM,
        hidden_size=128,
        head_dim=64,
    ),
]
