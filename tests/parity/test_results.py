# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch

from tests.parity import results
from tests.parity.comparison import Compared
from tests.parity.toys import case

POINTS = {0: ("pre_attn", "post_attn", "post_block"), 1: ("pre_attn", "mlp_in")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def outcome(error: float, problems: tuple[str, ...] = ()) -> results.Entry:
    compared = Compared(row_error=error, change_error=2 * error)
    compared.wrong_rows.extend(problems)
    return results.outcome(case("any"), compared, POINTS)


def test_variants_of_an_architecture_share_an_entry(path: Path) -> None:
    results.record({case("a"): outcome(1e-6)}, "cpu", path)
    results.record({case("b"): outcome(3e-6)}, "cpu", path)
    entry = results.read(path)["ToyForCausalLM float32 cpu"]
    assert entry["variants"] == ["a", "b"]
    assert entry["max_relative_error"] == 3e-6
    assert entry["intervention_error"] == 6e-6
    assert entry["hook_points"] == ["pre_attn", "post_attn", "post_block", "mlp_in"]


def test_a_later_run_replaces_what_it_speaks_of(path: Path) -> None:
    results.record({case("a"): outcome(1e-2), case("b"): outcome(1e-6)}, "cpu", path)
    results.record({case("a"): outcome(2e-6)}, "cpu", path)
    entry = results.read(path)["ToyForCausalLM float32 cpu"]
    assert entry["max_relative_error"] == 2e-6


def test_devices_have_entries_of_their_own(path: Path) -> None:
    results.record({case("a"): outcome(1e-6)}, "cpu", path)
    results.record({case("a"): outcome(1e-6)}, "cuda", path)
    assert len(results.read(path)) == 2


def test_what_is_not_proven_is_listed_with_its_reason(path: Path) -> None:
    found = {case("a"): outcome(1.0, ("rows of (0, 'pre_attn'): 1.0",))}
    results.record(found | {case("b"): results.failure("no kernel")}, "cpu", path)
    entry = results.read(path)["ToyForCausalLM float32 cpu"]
    assert entry["variants"] == []
    assert entry["max_relative_error"] is None
    assert entry["cases"]["b"]["reason"] == "no kernel"
    assert "pre_attn" in entry["cases"]["a"]["reason"]


def test_what_passed_without_figures_is_at_most_its_tolerance(path: Path) -> None:
    passed = outcome(1e-4) | {"at_most": True}
    results.record({case("a"): passed, case("b"): outcome(1e-6)}, "cuda", path)
    entry = results.read(path)["ToyForCausalLM float32 cuda"]
    assert entry["max_relative_error"] == 1e-4
    assert entry["at_most"] is True
    results.record({case("a"): outcome(2e-6)}, "cuda", path)
    assert "at_most" not in results.read(path)["ToyForCausalLM float32 cuda"]


def test_a_gpu_is_recorded_by_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    results.record({case("a"): outcome(1e-6)}, "cuda", path)
    results.record({case("a"): outcome(1e-6)}, "cpu", path)
    on_cpu, on_cuda = results.read(path).values()
    assert on_cuda["cases"]["a"]["gpu"] == "a GPU"
    assert "gpu" not in on_cpu["cases"]["a"]


def test_facts_of_other_suites_stay(path: Path) -> None:
    results.record({case("a"): outcome(1e-6)}, "cpu", path, tensor_parallel=True)
    results.record({case("a"): outcome(2e-6)}, "cpu", path)
    assert results.read(path)["ToyForCausalLM float32 cpu"]["tensor_parallel"] is True
