# SPDX-License-Identifier: Apache-2.0
"""Decoders without a comparison, each with the reason."""

from tests.parity.cases import Case

NO_MODEL = "Transformers 5.19 has no model of it, and no case renames another's"
CODE = "its configuration is code that comes with its checkpoints"
WITH_PICTURES = (
    "Transformers has its layers inside a model of pictures, and no case makes one"
)
BACKEND = (
    "upstream's Transformers backend asks for a processor of pictures, text or not"
)
ON_GPUS = (
    "upstream has it for GPUs only, with sparse attention; no case of it is written"
)

ABSENT = {
    NO_MODEL: (
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "K2HorizonForCausalLM",
        "LongcatFlashNgramForCausalLM",
        "PanguProMoEV2ForCausalLM",
        "PanguUltraMoEForCausalLM",
        "Param2MoEForCausalLM",
        "Plamo3ForCausalLM",
        "Step1ForCausalLM",
        "Step3TextForCausalLM",
    ),
    CODE: ("DeciLMForCausalLM",),
    WITH_PICTURES: (
        "Glm5NextForCausalLM",
        "Step3p5ForCausalLM",
    ),
    BACKEND: ("Emu3ForConditionalGeneration", "HunYuanVLForConditionalGeneration"),
    ON_GPUS: ("HYV4ForCausalLM", "MiniMaxM3SparseForCausalLM"),
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
