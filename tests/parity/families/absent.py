# SPDX-License-Identifier: Apache-2.0
"""Decoders without a comparison, each with the reason."""

from tests.parity.cases import Case

NO_MODEL = "Transformers 5.19 has no model of it, and no case renames another's"
CODE = "its configuration is code that comes with its checkpoints"
WITH_PICTURES = (
    "Transformers has its layers inside a model of pictures, and no case makes one"
)
DELTA = "its delta attention has no kernel on a CPU, and no case for a GPU is written"
BACKEND = (
    "upstream's Transformers backend asks for a processor of pictures, text or not"
)
ON_GPUS = (
    "upstream has it for GPUs only, with sparse attention; no case of it is written"
)

IN_FP8 = "upstream keeps its cache in FP8 on every device, and no case allows for that"

ABSENT = {
    NO_MODEL: (
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "Dots3NoteForCausalLM",
        "HfMoondream",
        "InternS1ProForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "IQuestLoopCoderForCausalLM",
        "K2HorizonForCausalLM",
        "KimiK3ForConditionalGeneration",
        "LongcatFlashNgramForCausalLM",
        "Molmo2ForConditionalGeneration",
        "MolmoForCausalLM",
        "Moondream3ForCausalLM",
        "PanguProMoEV2ForCausalLM",
        "PanguUltraMoEForCausalLM",
        "Param2MoEForCausalLM",
        "Plamo3ForCausalLM",
        "Step1ForCausalLM",
        "Step3TextForCausalLM",
    ),
    CODE: ("DeciLMForCausalLM",),
    IN_FP8: ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
    DELTA: ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"),
    WITH_PICTURES: (
        "CohereCompassForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Step3p5ForCausalLM",
    ),
    BACKEND: ("Emu3ForConditionalGeneration", "HunYuanVLForConditionalGeneration"),
    ON_GPUS: (
        "HYV4ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    ),
}
CASES = [
    Case(
        architecture=architecture,
        model_type="",
        options={},
        variant="none",
        never=reason,
    )
    for reason, names in ABSENT.items()
    for architecture in names
]
