# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fork.architectures.page import page
from fork.architectures.reports import UNKNOWN, ArchitectureReport, reports
from tests.fork.architectures._release import EMPTY, TABLES, write

WITH_EMPTY = TABLES | {
    "_TEXT_GENERATION_MODELS": TABLES["_TEXT_GENERATION_MODELS"] | EMPTY
}
POINTS = ("pre_attn", "post_attn", "post_block")


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, ArchitectureReport]:
    return {row.architecture: row for row in reports(write(tmp_path, WITH_EMPTY))}


def layers(row: ArchitectureReport) -> list[str]:
    return [layer.name for layer in row.layers]


def test_an_architecture_has_the_layers_of_its_stack(rows) -> None:
    (layer,) = rows["FirstForCausalLM"].layers
    assert layer.name == "FirstDecoderLayer"
    assert layer.points[:3] == POINTS


def test_a_layer_that_is_chosen_replaces_the_stack_s_own(rows) -> None:
    assert layers(rows["ChosenForCausalLM"]) == ["ChosenDecoderLayer"]


def test_a_layer_has_the_points_of_the_forward_that_it_inherits(rows) -> None:
    (layer,) = rows["HeirForCausalLM"].layers
    (base,) = rows["FirstForCausalLM"].layers
    assert (layer.module, layer.name) == (
        "vllm/model_executor/models/heir.py",
        "HeirDecoderLayer",
    )
    assert layer.points == base.points
    assert layer.points[3:] == ("mlp_in", "mlp_out", "attn_add", "mlp_add")


def test_what_wraps_a_named_model_has_its_layers(rows) -> None:
    row = rows["NamedForCausalLM"]
    assert row.wraps == ("FirstForCausalLM",)
    assert row.layers == rows["FirstForCausalLM"].layers


def test_what_wraps_any_model_says_so(rows) -> None:
    row = rows["AnyForCausalLM"]
    assert (row.layers, row.refused) == ((), "")
    assert "that its configuration names" in row.note


def test_what_does_not_generate_is_refused(rows) -> None:
    assert "nothing is generated" in rows["FirstModel"].refused


def test_an_architecture_without_layers_or_reason_is_unknown(rows) -> None:
    assert [name for name in rows if rows[name].refused == UNKNOWN] == [
        "EmptyForCausalLM"
    ]


RESULT = {
    "architecture": "FirstForCausalLM",
    "dtype": "float32",
    "device": "cpu",
    "max_relative_error": 2e-6,
    "intervention_error": 3e-6,
    "tensor_parallel": True,
}


def test_the_page_has_the_proofs(rows) -> None:
    text = page(list(rows.values()), {"one": RESULT})
    row = "| FirstForCausalLM | 3 | analysis | float32 2e-06 / 3e-06 | – | yes | – |"
    assert row in text.replace("| 7 |", "| 3 |").splitlines()
    assert "| EmptyForCausalLM | refused |" in text
    assert "- EmptyForCausalLM: no decoder layer was found." in text


def test_the_page_tells_what_is_known_only_to_be_allowed(rows) -> None:
    result = RESULT | {"device": "cuda", "at_most": True}
    text = page(list(rows.values()), {"one": result})
    assert "| – | float32 ≤ 2e-06 / 3e-06 | yes |" in text


def test_the_page_names_the_gpus(rows) -> None:
    cases = {name: {"proven": True, "gpu": "a GPU"} for name in ("plain", "wide")}
    cases["lost"] = {"proven": False, "gpu": "a GPU", "reason": "lost"}
    result = RESULT | {"device": "cuda", "cases": cases}
    text = page(list(rows.values()), {"one": result})
    assert "- Configurations proven under CUDA, on a GPU: 2." in text


def test_the_page_says_why_what_is_not_proven_is_not(rows) -> None:
    lost = {"proven": False, "reason": "its weights are lost"}
    ended = {"proven": False, "reason": f"ValueError: no `kernel` {'x ' * 200}"}
    cases = {"plain": lost, "wide": lost, "long": ended, "other": {"proven": True}}
    on_cpu = RESULT | {"cases": cases}
    on_cuda = on_cpu | {"device": "cuda", "cases": {"wide": lost}}
    text = page(list(rows.values()), {"one": on_cpu, "two": on_cuda})
    names = "FirstForCausalLM (CPU), FirstForCausalLM, wide (CPU, CUDA)"
    assert f"- {names}: its weights are lost." in text
    (line,) = (row for row in text.splitlines() if "FirstForCausalLM, long" in row)
    assert ": `ValueError: no 'kernel' x x" in line
    assert line.endswith(" ...`.")
    assert len(line) < 240
    assert "FirstForCausalLM, other" not in text


def test_the_page_says_how_some_were_compared(rows) -> None:
    case = {"proven": True, "notes": ["they differ in a rounding"]}
    text = page(list(rows.values()), {"one": RESULT | {"cases": {"plain": case}}})
    assert "- FirstForCausalLM: they differ in a rounding." in text


def test_the_page_lists_the_points_inside_the_block(rows) -> None:
    case = {"proven": True, "unproven": {"q": "the library has no tensor of it"}}
    result = RESULT | {
        "hook_points": ["pre_attn", "mlp_in", "z", "final_norm"],
        "cases": {"plain": case},
    }
    text = page(list(rows.values()), {"one": result})
    assert "- CPU, 1 with `mlp_in z final_norm`: FirstForCausalLM." in text
    assert (
        "- Not compared, the library has no tensor of it: FirstForCausalLM (`q`)."
        in text
    )
