# SPDX-License-Identifier: Apache-2.0
"""Cases of other families in bfloat16, as models are served.

A few of each kind of block: each point, inside the blocks too, may lose twice what the
library itself loses in bfloat16.
"""

from dataclasses import replace

from tests.parity.cases import GENTLE, Case
from tests.parity.families import backend, experts, llama, norms, parallel

CHOSEN = (
    "CohereForCausalLM",
    "Gemma2ForCausalLM",
    "Glm4ForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
EVERY_EXPERT = {
    "MixtralForCausalLM": {"num_experts_per_tok": 4, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts_per_tok": 4, "num_experts": 4},
}
"""A choice may depend on rounding."""


def rounded(case: Case) -> Case:
    """The case in bfloat16, with weights that suit it."""
    return replace(
        case,
        dtype="bfloat16",
        scale=GENTLE,
        representative=False,
        options={**case.options, **EVERY_EXPERT.get(case.architecture, {})},
    )


_OTHERS = (backend, experts, llama, norms, parallel)
CASES = [
    rounded(case)
    for family in _OTHERS
    for case in family.CASES
    if case.architecture in CHOSEN and case.variant == "plain"
]
