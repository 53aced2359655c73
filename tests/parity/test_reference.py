# SPDX-License-Identifier: Apache-2.0
"""The reference is correct: its hooks agree with the library's own outputs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.cases import Case, common
from tests.parity.comparison import neighbours
from tests.parity.distance import relative
from tests.parity.families import repeated
from tests.parity.recipe import PARALLEL, PLAIN, SANDWICH
from tests.parity.reference import Reference

TOKENS = [5, 9, 200, 31, 77, 3]
CASES = [
    Case(
        architecture="LlamaForCausalLM",
        model_type="llama",
        options=common(),
        recipe=PLAIN,
    ),
    Case(
        architecture="CohereForCausalLM",
        model_type="cohere",
        options=common(tie_word_embeddings=True),
        recipe=PARALLEL,
    ),
    Case(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        options=common(query_pre_attn_scalar=32, tie_word_embeddings=True),
        recipe=SANDWICH,
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=[c.architecture for c in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def library(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.save(tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def reference(case: Case, library: Path) -> Reference:
    return Reference(library, case.torch_dtype, case.recipe)


def test_layers_begin_and_end_with_the_hidden_states(
    reference: Reference, library: Path
) -> None:
    rows, _ = reference.run(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(library, attn_implementation="eager")
    with torch.no_grad():
        output = model(torch.tensor([TOKENS]), output_hidden_states=True)
    for layer, hidden in enumerate(output.hidden_states[:-1]):
        assert torch.equal(rows[layer, "pre_attn"], hidden[0])
        if layer:
            assert torch.equal(rows[layer - 1, "post_block"], hidden[0])


def test_adding_at_the_end_of_a_layer_is_adding_at_the_next(
    reference: Reference,
) -> None:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(1))
    with reference.adding((0, "post_block"), vector):
        leaving, one = reference.run(TOKENS)
    with reference.adding((1, "pre_attn"), vector):
        entering, other = reference.run(TOKENS)
    assert torch.equal(one, other)
    # After the change at the layer's end, before it at the next layer's start.
    difference = leaving[1, "pre_attn"] - entering[1, "pre_attn"]
    assert torch.allclose(difference, vector.expand_as(difference), atol=1e-5)


@pytest.mark.parametrize("hook", ["pre_attn", "post_attn", "post_block"])
def test_what_is_added_arrives_in_the_stream(reference: Reference, hook: str) -> None:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(2))
    plain, _ = reference.run(TOKENS)
    with reference.adding((2, hook), vector):
        _, changed = reference.run(TOKENS)
    with reference.adding((2, hook), -vector):
        _, opposite = reference.run(TOKENS)
    again, logits = reference.run(TOKENS)
    assert all(torch.equal(plain[tap], again[tap]) for tap in plain)
    assert not torch.allclose(changed, logits, rtol=1e-2)
    assert not torch.allclose(changed, opposite, rtol=1e-2)


def test_wrong_rows_are_detected(reference: Reference) -> None:
    rows, _ = reference.run(TOKENS)
    assert all(relative(found, found) == 0.0 for found in rows.values())
    bounds = dict.fromkeys(rows, 1e-4)
    passed = [what for what, passes in neighbours(rows, set(rows), bounds) if passes]
    assert not passed


def test_rows_that_are_no_numbers_are_wrong() -> None:
    expected = torch.ones(2, 4)
    assert relative(expected * torch.nan, expected) == float("inf")
    assert relative(torch.ones(1, 4), expected) == float("inf")
    assert relative(torch.ones(2, 4), torch.zeros(2, 4)) == float("inf")


def test_each_run_of_a_layer_has_hook_points_of_its_own(tmp_path: Path) -> None:
    (case,) = repeated.CASES
    reference = Reference(case.save(tmp_path)[0], case.torch_dtype, case.recipe)
    first, again = reference.points[0, "pre_attn"], reference.points[4, "pre_attn"]
    assert first.read.module is again.read.module
    plain, _ = reference.run(TOKENS, 4)
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    with reference.adding((4, "pre_attn"), vector):
        changed, _ = reference.run(TOKENS, 4)
    assert torch.equal(plain[3, "post_block"], changed[3, "post_block"])
    assert not torch.allclose(plain[4, "post_block"], changed[4, "post_block"])
    causal, _ = reference.run(TOKENS)
    seen = [rows[0, "post_attn"] for rows in (plain, causal)]
    assert not torch.allclose(seen[0][0], seen[1][0])
    assert torch.allclose(seen[0][4:], seen[1][4:], atol=1e-5)
