# SPDX-License-Identifier: Apache-2.0
"""Language models inside multimodal ones, with text input only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.parity.cases import GENTLE, Case, common
from tests.parity.families.experts import ROUTED, SPARSE
from tests.parity.families.hybrids import CONVOLUTION, LINEAR, ROTATION, TRITON, WRONG
from tests.parity.families.hybrids import SPARSE as ALL_CHOSEN
from tests.parity.families.llama import MULTIPLIERS, WINDOWED
from tests.parity.families.norms import GEMMA, GEMMA4
from tests.parity.recipe import PARALLEL, PLAIN, POST_NORM, SANDWICH, SCALED, Recipe
from tests.parity.stand_ins import TORCHVISION
from tests.parity.twins import Twin

LAYERS = "model.language_model.layers"
TEXT_LAYERS = "model.text_model.layers"
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}
INTERN = TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}
BLOCKS = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
}
QWEN2 = BLOCKS | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
QWEN2_5 = BLOCKS | {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
QWEN3_5 = BLOCKS | {"out_hidden_size": 64, "num_position_embeddings": 16}
# Of three layers of the common sizes the rows of an MLP on a GPU are 2.2e-2 from the
# library's in bfloat16, on a CPU 1.7e-2, and the library's own 1.6e-2 from those in
# float32; of these, 1.3e-2 on a CPU and 1.0e-2.
WIDE = LINEAR | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN3 = QWEN3_5 | {"deepstack_visual_indexes": [0, 1]}
LLAMA4 = TOWER | {
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "image_size": 56,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
MUSE = TOWER | {
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention"],
    "output_dim": 128,
}
# Outside the vocabulary, so that no prompt token is taken for an image.
IMAGE, VIDEO, AUDIO, START, END = range(300, 305)
INDEX = {"image_token_index": IMAGE}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_IDS = IDS | {"vision_start_token_id": START, "vision_end_token_id": END}
GLM_IDS = IDS | {
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": START,
    "video_end_token_id": END,
}
GLM = Recipe(
    attention=("post_self_attn_layernorm",), middle=("post_attention_layernorm",)
)


def rope(*sections: int) -> dict[str, Any]:
    """Rotary embeddings of time, height and width; text uses time only."""
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": list(sections),
        "partial_rotary_factor": 1.0,
    }


def text(model_type: str, **options: Any) -> dict[str, Any]:
    """The configuration of the language model."""
    return {"model_type": model_type} | common(**options)


def case(
    architecture: str,
    model_type: str,
    language: Mapping[str, Any],
    vision: Mapping[str, Any],
    recipe: Recipe = PLAIN,
    layers: str = LAYERS,
    twin: Twin | None = None,
    **options: Any,
) -> Case:
    whole = {"text_config": language, "vision_config": vision}
    return Case(
        architecture=architecture,
        model_type=model_type,
        options={**whole, "tie_word_embeddings": False, **options},
        recipe=replace(recipe, layers=layers),
        engine={"language_model_only": True},
        loader="AutoModelForImageTextToText",
        stand_ins=TORCHVISION,
        twin=twin,
    )


def in_bfloat16(one: Case, seed: int) -> Case:
    engine = {**one.engine, **TRITON}
    return replace(one, dtype="bfloat16", scale=GENTLE, seed=seed, engine=engine)


MROPE = {"rope_parameters": rope(4, 6, 6)}
CASES = [
    case(
        "LlavaForConditionalGeneration",
        "llava",
        text("llama"),
        CLIP,
        **INDEX,
    ),
    case(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        text("mistral", sliding_window=None),
        CLIP,
        **INDEX,
    ),
    case(
        "LlavaNextVideoForConditionalGeneration",
        "llava_next_video",
        text("llama"),
        CLIP,
        **INDEX,
        video_token_index=VIDEO,
    ),
    case(
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision",
        text("qwen2"),
        SIGLIP,
        **INDEX,
        video_token_index=VIDEO,
    ),
    case(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        text("gemma3_text", sliding_window=16, layer_types=WINDOWED, **GEMMA),
        SIGLIP,
        SANDWICH,
        **INDEX,
        mm_tokens_per_image=4,
    ),
    case(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {**text("gemma4_text", **GEMMA4), "pad_token_id": 0},
        {
            "model_type": "gemma4_vision",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        SANDWICH,
        **IDS,
        audio_token_id=AUDIO,
    ),
    case(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        text(
            "gemma",
            hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
        SIGLIP,
        **INDEX,
        tie_word_embeddings=True,
        projection_dim=64,
    ),
    case(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        text("mistral", sliding_window=None),
        PIXTRAL,
        **INDEX,
    ),
    case(
        "Llama4ForConditionalGeneration",
        "llama4",
        text(
            "llama4_text",
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            num_hidden_layers=4,
            attention_chunk_size=128,
            attn_temperature_tuning=False,
        ),
        LLAMA4,
        layers="language_model.model.layers",
        **INDEX,
        boi_token_index=START,
        eoi_token_index=END,
    ),
    case(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        text("qwen2_vl_text", **MROPE),
        QWEN2,
        **QWEN_IDS,
    ),
    case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        text("qwen2_5_vl_text", **MROPE),
        QWEN2_5 | {"window_size": 28},
        **QWEN_IDS,
    ),
    case(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        text("qwen3_vl_text", **MROPE),
        QWEN3,
        **QWEN_IDS,
    ),
    case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        text("qwen3_vl_moe_text", norm_topk_prob=True, **MROPE, **SPARSE),
        QWEN3,
        # Published checkpoints store the experts' weights in this orientation.
        twin=Twin(transposed=("experts.gate_up_proj", "experts.down_proj")),
        **QWEN_IDS,
    ),
    in_bfloat16(
        case(
            "Qwen3_5ForConditionalGeneration",
            "qwen3_5",
            text("qwen3_5_text", **WIDE),
            QWEN3_5 | {"out_hidden_size": 256},
            **QWEN_IDS,
        ),
        seed=1,
    ),
    in_bfloat16(
        case(
            "Qwen3_5MoeForConditionalGeneration",
            "qwen3_5_moe",
            text("qwen3_5_moe_text", **LINEAR, **ALL_CHOSEN),
            QWEN3_5,
            **QWEN_IDS,
        ),
        seed=3,
    ),
    case(
        "InternVLForConditionalGeneration",
        "internvl",
        text("qwen2"),
        INTERN,
        image_token_id=IMAGE,
    ),
    case(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        text("llama"),
        TOWER,
        layers=TEXT_LAYERS,
        image_token_id=IMAGE,
        scale_factor=2,
    ),
    case(
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        text("llama"),
        TOWER,
        layers=TEXT_LAYERS,
        image_token_id=IMAGE,
    ),
    case(
        "Cohere2VisionForConditionalGeneration",
        "cohere2_vision",
        text(
            "cohere2",
            # The library's multimodal model omits the scale of the logits.
            logit_scale=1.0,
            sliding_window=128,
            layer_types=WINDOWED,
            tie_word_embeddings=True,
        ),
        SIGLIP,
        PARALLEL,
        image_token_id=IMAGE,
        alignment_intermediate_size=64,
        tie_word_embeddings=True,
    ),
    case(
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        text("exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
        QWEN2_5 | {"window_size": 28, "num_key_value_heads": 2},
        POST_NORM,
        **IDS,
    ),
    case(
        "GlmOcrForConditionalGeneration",
        "glm_ocr",
        text(
            "glm_ocr_text",
            head_dim=64,
            hidden_size=128,
            rope_parameters=rope(8, 12, 12),
        ),
        BLOCKS | {"out_hidden_size": 128, "image_size": 56},
        GLM,
        **GLM_IDS,
    ),
    case(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        text(
            "glm4v_moe_text",
            use_qk_norm=False,
            first_k_dense_replace=1,
            **MROPE,
            **ROUTED,
        ),
        BLOCKS | {"out_hidden_size": 64, "image_size": 56},
        **GLM_IDS,
    ),
    *(
        case(
            architecture,
            "muse_glimmer",
            text(
                "muse_glimmer_text",
                sliding_window=16,
                layer_types=["sliding_attention"] * 2 + ["full_attention"],
            ),
            MUSE,
            SANDWICH,
            **IDS,
            out_hidden_size=128,
            projector_hidden_size=32,
        )
        for architecture in (
            "MuseGlimmerForCausalLM",
            "MuseGlimmerForConditionalGeneration",
        )
    ),
    replace(
        case(
            "Lfm2VlForConditionalGeneration",
            "lfm2_vl",
            text("lfm2", conv_dim=64, block_dim=64, block_ff_dim=96, **CONVOLUTION),
            SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 4},
            image_token_id=IMAGE,
            projector_hidden_size=32,
            tie_word_embeddings=True,
        ),
        on_cpu=ROTATION,
        note=WRONG,
    ),
    case(
        "PaddleOCRVLForConditionalGeneration",
        "paddleocr_vl",
        text("paddleocr_vl_text", **MROPE),
        TOWER,
        **QWEN_IDS,
    ),
    case(
        "Granite4VisionForConditionalGeneration",
        "granite4_vision",
        text("granite", **MULTIPLIERS),
        SIGLIP | {"hidden_size": 64},
        SCALED,
        **INDEX,
        deepstack_layer_map=[[0, 0]],
        spatial_target_layers=[1],
        downsample_rate="1/2",
    ),
    case(
        "AriaForConditionalGeneration",
        "aria",
        text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        TOWER | {"model_type": "idefics3_vision"},
        **INDEX,
        projector_patch_to_query_dict={4: 4},
    ),
]
