# SPDX-License-Identifier: Apache-2.0
"""What stands in for a proof of architectures that have none by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from fork.architectures.library import installed
from fork.architectures.page import page
from fork.architectures.reports import ArchitectureReport, reports
from fork.architectures.unproven import ANY_WRAPPED, stands_in, unexplained
from fork.building.builder import Order, open_release
from fork.paths import HERE
from tests.fork.architectures._release import TABLES, write

FIRST = {"architecture": "FirstForCausalLM", "device": "cpu", "dtype": "float32"}
PROVEN = {"one": {**FIRST, "max_relative_error": 1e-6, "intervention_error": 1e-6}}


@pytest.fixture
def rows(tmp_path: Path) -> list[ArchitectureReport]:
    return reports(write(tmp_path, TABLES))


def test_layers_that_are_proven_stand_in(rows: list[ArchitectureReport]) -> None:
    found = stands_in(rows, PROVEN)
    assert found["NamedForCausalLM"] == "their layers are those of FirstForCausalLM"
    assert found["AnyForCausalLM"] == ANY_WRAPPED
    assert "FirstForCausalLM" not in found and "FirstModel" not in found
    assert found["ChosenForCausalLM"] == ""
    line = "- NamedForCausalLM: their layers are those of FirstForCausalLM."
    assert line in page(rows, PROVEN).splitlines()


def test_what_has_neither_is_named(rows: list[ArchitectureReport]) -> None:
    assert "ChosenForCausalLM" in set(unexplained(rows, PROVEN))
    assert "ChosenForCausalLM" in page(rows, PROVEN).split("no case is written")[0]
    lost = {"proven": False, "reason": "lost"}
    given: Any = {"architecture": "ChosenForCausalLM", "device": "cpu"}
    known = {**PROVEN, "two": given | {"cases": {"plain": lost}}}
    assert "ChosenForCausalLM" not in set(unexplained(rows, known))


@pytest.mark.soak
def test_every_architecture_of_the_release_has_a_proof_or_a_reason() -> None:
    found = reports(open_release(Order(device="cpu")).root, library=installed())
    results = json.loads(HERE.parity_results.read_text())
    assert list(unexplained(found, results)) == []
