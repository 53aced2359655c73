# SPDX-License-Identifier: Apache-2.0
import pickle
from pathlib import Path

import pytest

from tests.parity import results, suite
from tests.parity.cases import Case
from tests.parity.comparison import Compared
from tests.parity.families import CASES
from tests.parity.processes import CaseFailed
from tests.parity.suite import Suite
from tests.parity.toys import case


def prove(case: Case, device: str) -> suite.Outcome:
    """A stand-in for the comparison: a case's variant determines its result."""
    if case.variant == "stopped":
        raise CaseFailed("RuntimeError: no kernel")
    if case.variant == "broken":
        raise TypeError("cannot be sent")
    return Compared(row_error=1e-6), {0: ("pre_attn",)}


def test_a_case_that_fails_does_not_keep_others_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    monkeypatch.setattr(suite, "prove", prove)
    monkeypatch.setenv("PARITY_RECORD", "1")
    Suite([case("broken"), case("plain"), case("stopped")], "cpu", path).close()
    entry = results.read(path)["ToyForCausalLM float32 cpu"]
    assert entry["variants"] == ["plain"]
    reasons = {name: found.get("reason") for name, found in entry["cases"].items()}
    assert reasons == {
        "plain": None,
        "stopped": "RuntimeError: no kernel",
        "broken": "TypeError: cannot be sent",
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_case_can_go_to_a_new_process(device: str) -> None:
    for form in (one.on(device) for one in CASES):
        there = pickle.loads(pickle.dumps(form))
        assert (there.name, there.options) == (form.name, form.options)
