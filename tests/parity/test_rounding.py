# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from tests.parity.cases import GENTLE, Case, common
from tests.parity.rounding import rounding

CASE = Case(
    architecture="LlamaForCausalLM",
    model_type="llama",
    options=common(num_hidden_layers=2),
    dtype="bfloat16",
    scale=GENTLE,
)


def test_bfloat16_changes_rows_by_a_little_and_larger_weights_by_more() -> None:
    found = rounding(CASE)
    # The point that changes most depends on the processor's instructions.
    assert 2**-9 < found.error < 2**-5
    assert rounding(replace(CASE, scale=4 * GENTLE)).error > found.error
