# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks, pipeline stages, or both, equal one process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest
import torch

from tests.multiprocess.architectures import ARCHITECTURES, HIDDEN, LAYERS
from tests.multiprocess.compare import (
    kept_rows,
    same_hooks,
    same_readouts,
    same_receipt,
)
from tests.multiprocess.observe import (
    HOOKS,
    LAYOUTS,
    NEW_TOKENS,
    PILOT,
    PROMPT_LENGTHS,
    STEERED,
    Order,
    gated,
    operated,
    run,
)
from tests.parity.results import note
from tests.support.hf_reference import Reference, relative_error
from tests.support.plugins import install
from vllm.v1.capture.consumers.arrow import rows_of
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

SPLITS = {
    "one": (1, 1),
    "tensor": (2, 1),
    "four": (4, 1),
    "pipeline": (1, 2),
    "both": (2, 2),
}
"""Tensor-parallel ranks and pipeline stages."""
PARTS = [split for split in SPLITS if split != "one"]
FACTS = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel"}
"""What is noted of an architecture, by split."""
EXPERTS = {("experts", "both")}
"""Engines whose ranks divide whole experts."""
ACTING = {("llama", split) for split in SPLITS}
"""Engines with a consumer that runs within the steps."""
Found = dict[str, Any]
TAPS = {(layer, hook) for layer in range(LAYERS) for hook in HOOKS}


class Workbench:
    """Models and engines' results, each computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, str], Found | AssertionError] = {}

    def model(self, name: str) -> Path:
        folder = self._folder / name
        return folder if folder.exists() else ARCHITECTURES[name].save(folder)

    def reference(self, name: str) -> Reference:
        return Reference(self.model(name), recipe=ARCHITECTURES[name].recipe)

    def found(self, name: str, split: str) -> Found:
        if (name, split) not in self._found:
            base = self._folder / f"{name}-{split}"
            ranks = SPLITS[split]
            plugins = str(self._plugins()) if (name, split) in ACTING else ""
            order = Order(
                str(self.model(name)),
                str(base),
                f"{base}.pt",
                *ranks,
                plugins,
                experts=(name, split) in EXPERTS,
            )
            try:
                self._found[name, split] = run(order, timeout=1500)
            except AssertionError as error:  # It is not run again.
                self._found[name, split] = error
        found = self._found[name, split]
        if isinstance(found, AssertionError):
            raise found
        return found

    def _plugins(self) -> Path:
        folder = self._folder / "plugins"
        if not folder.exists():
            install(folder, "pilot", PILOT, pilot="pilot:Pilot")
        return folder

    def root(self, name: str, split: str) -> Path:
        return self._folder / f"{name}-{split}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.fixture(autouse=True)
def possible(request: pytest.FixtureRequest) -> None:
    """Skip what upstream cannot start; the last test checks that it still cannot.

    And four ranks of models with two heads.
    """
    chosen = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    tensor, stages = SPLITS[chosen.get("split", "one")]
    model = ARCHITECTURES[chosen.get("name", "llama")]
    if stages > 1 and model.not_in_stages is not None:
        pytest.skip(model.not_in_stages)
    if tensor > model.heads:
        pytest.skip(f"it has {model.heads} heads for {tensor} ranks")


def fed(request: Found) -> list[int]:
    return [*request["prompt"], *request["tokens"]][:-1]


@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_those_of_the_library(bench: Workbench, name: str, split: str) -> None:
    reference = bench.reference(name)
    for request in bench.found(name, split)["plain"]:
        expected = reference.stream(fed(request))
        assert set(request["rows"]) == TAPS
        for tap, rows in request["rows"].items():
            assert relative_error(rows, expected[tap]) < 1e-4, tap
            sidecar = request["sidecars"][tap]
            assert sidecar["positions"] == list(range(len(fed(request))))
            assert sidecar["token_ids"] == fed(request)


@pytest.mark.parametrize("split", PARTS)
@pytest.mark.parametrize(
    "kind", ["plain", "steered", "gated", "operated", "under all", "again"]
)
def test_a_split_model_gives_what_one_process_gives(
    bench: Workbench, name: str, split: str, kind: str
) -> None:
    whole, parts = bench.found(name, "one")[kind], bench.found(name, split)[kind]
    sizes = {"plain": PROMPT_LENGTHS, "steered": STEERED, "gated": gated()}
    sizes |= {"operated": operated(), "under all": range(2), "again": range(4)}
    assert len(whole) == len(parts) == len(sizes[kind])
    equal(whole, parts)
    if kind == "steered" and split in FACTS and os.environ.get("PARITY_RECORD"):
        note(ARCHITECTURES[name].name, FACTS[split])


@pytest.mark.parametrize("split", SPLITS)
def test_rows_of_cached_blocks_come_from_the_activation_store(
    bench: Workbench, name: str, split: str
) -> None:
    found = bench.found(name, split)["again"]
    # A consumer within the step reads the rows of every token.
    cached = 0 if (name, split) in ACTING else 32
    assert [one["cached"] // len(TAPS) for one in found] == [0, cached, 0, cached]


def equal(whole: list[Found], parts: list[Found]) -> None:
    """Compare requests of a split model with those of one process."""
    for one, other in zip(whole, parts, strict=True):
        assert one["tokens"] == other["tokens"] and one["cached"] == other["cached"]
        assert other["statuses"] == {"keeper": "ok"}
        assert relative_error(logits(other), logits(one)) < 1e-4
        assert one["rows"].keys() == other["rows"].keys() == TAPS
        for tap, rows in one["rows"].items():
            assert relative_error(other["rows"][tap], rows) < 1e-4, tap


@pytest.mark.parametrize(("name", "split"), sorted(ACTING))
def test_what_a_consumer_within_the_step_decides_reaches_every_rank(
    bench: Workbench, name: str, split: str
) -> None:
    found, one = bench.found(name, split), bench.found(name, "one")["acted"]
    for whole, parts in zip(one, found["acted"], strict=True):
        equal(whole, parts)
    plain, *others = found["acted"]
    changed = [
        [relative_error(logits(a), logits(b)) > 1e-3 for a, b in zip(both, plain)]
        for both in others
    ]
    no, alone, both = [False, False], [True, False], [True, True]
    assert changed == [alone, alone, no, both, both, no]
    ranks = found["dynamic"]
    assert len(ranks) == np.prod(SPLITS[split])
    pilots = [rank["sync_consumers"].get("pilot") for rank in ranks]
    assert [pilot is not None for pilot in pilots] == [
        rank["tp_rank"] == 0 for rank in ranks
    ]
    assert [bool(pilot and pilot["steps"]) for pilot in pilots].count(True) == 1
    assert len({rank["action_checksum"] for rank in ranks}) == 1
    assert all(rank["action_queue"]["applied"] > 4 for rank in ranks)
    assert ranks[0]["action_queue"]["rejected"] > 0


@pytest.mark.parametrize("split", SPLITS)
def test_conditions_act_and_are_counted_at_every_stage(
    bench: Workbench, name: str, split: str
) -> None:
    found = bench.found(name, split)
    for number, one in enumerate(found["gated"]):
        plain = found["plain"][number % len(PROMPT_LENGTHS)]
        assert relative_error(logits(one), logits(plain)) > 1e-2, number
    assert {fired["layer"] for fired in found["fired"]} == {0, 1, 2}
    assert found["fired"] == bench.found(name, "one")["fired"]


@pytest.mark.parametrize("split", PARTS)
def test_readouts_are_those_of_one_process(
    bench: Workbench, name: str, split: str
) -> None:
    whole, parts = bench.found(name, "one"), bench.found(name, split)
    one, other = whole["read"], parts["read"]
    assert not one["errors"] and not other["errors"]
    same_readouts(one["arrays"], other["arrays"])


@pytest.mark.parametrize("split", SPLITS)
def test_all_that_steers_acts(bench: Workbench, name: str, split: str) -> None:
    found = bench.found(name, split)
    plain, under_all = found["plain"][0], found["under all"][:1]
    changed = [*found["steered"], *found["operated"], *under_all]
    for number, one in enumerate(changed):
        assert relative_error(logits(one), logits(plain)) > 1e-3, number


@pytest.mark.parametrize("split", PARTS)
def test_hook_functions_see_and_change_what_they_do_in_one_process(
    bench: Workbench, name: str, split: str
) -> None:
    one, other = bench.found(name, "one")["hooked"], bench.found(name, split)["hooked"]
    assert other["tokens"] == one["tokens"]
    layers = {("1", 0), ("1", 2), ("1", 3), ("2", 1)}
    assert kept_rows(one["results"]).keys() == layers
    same_hooks(one["results"], other["results"])


@pytest.mark.parametrize("split", SPLITS)
def test_only_the_first_rank_of_a_stage_has_staging_memory(
    bench: Workbench, name: str, split: str
) -> None:
    tensor, stages = SPLITS[split]
    staging = bench.found(name, split)["staging"]
    ranks = [(one["stage"], one["tensor_rank"]) for one in staging]
    assert sorted(ranks) == [(s, t) for s in range(stages) for t in range(tensor)]
    row = HIDDEN * 4
    assert all(
        one["device_bytes"] > 100 * row
        if one["tensor_rank"] == 0
        else one["device_bytes"] == row
        for one in staging
    )


@pytest.mark.parametrize("split", PARTS)
def test_a_module_that_is_registered_later_is_at_every_rank(
    bench: Workbench, name: str, split: str
) -> None:
    one = bench.found(name, "one")["registered"]
    other = bench.found(name, split)["registered"]
    assert not one["read"]["errors"] and not other["read"]["errors"]
    (expected,), (found,) = (
        one["read"]["arrays"].values(),
        other["read"]["arrays"].values(),
    )
    assert len(found) == PROMPT_LENGTHS[1] + NEW_TOKENS - 1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert other["gone"] == one["gone"] and "'later'" in other["gone"]


@pytest.mark.parametrize("split", PARTS)
def test_a_patching_sweep_is_that_of_one_process(
    bench: Workbench, name: str, split: str
) -> None:
    one, other = bench.found(name, "one")["swept"], bench.found(name, split)["swept"]
    assert set(one["values"]) == set(HOOKS)
    for hook, expected in one["values"].items():
        assert expected.shape == (LAYERS, 3)
        assert np.ptp(expected) > 1e-3, hook
        np.testing.assert_allclose(other["values"][hook], expected, atol=1e-4)
    assert max(one["noise_floor"], other["noise_floor"]) < 1e-4


@pytest.mark.parametrize("split", SPLITS)
def test_a_readout_of_any_stage_ends_the_text_where_it_fires(
    bench: Workbench, name: str, split: str
) -> None:
    ended = bench.found(name, split)["ended"]
    assert any(len(one["tokens"]) > 1 for one in ended)
    for one in ended:
        scores, above = one["scores"][:, one["rule"]["index"]], one["rule"]["above"]
        assert one["error"] is None
        assert len(scores) == len(one["tokens"]) < len(one["whole"])
        assert one["tokens"] == one["whole"][: len(scores)]
        assert one["stop_reason"] == "readout:probe"
        assert scores[-1] > above and (scores[:-1] <= above).all()


@pytest.mark.parametrize("split", SPLITS)
def test_rows_around_a_token_are_kept_on_every_stage(
    bench: Workbench, name: str, split: str
) -> None:
    requests = bench.found(name, split)["around"]
    assert any(one["fired"] for one in requests)
    for one in requests:
        stop = len(next(iter(one["whole"].values())))
        near = {p + d for p in one["fired"] for d in (-2, -1, 0, 1)}
        wanted = sorted(p for p in near if 0 <= p < stop)
        assert one["status"] == "ok" and bool(one["rows"]) == bool(wanted)
        for tap, rows in one["rows"].items():
            assert one["positions"][tap] == wanted
            expected = one["whole"][tap][wanted]
            torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("split", PARTS)
def test_a_receipt_is_that_of_one_process(
    bench: Workbench, name: str, split: str
) -> None:
    one = bench.found(name, "one")["told"]["receipt"]
    other = bench.found(name, split)["told"]["receipt"]
    assert [entry["tokens"] > 0 for entry in one["applied"]] == [True] * 3
    far, near = one["fired"].values()
    assert (far["layer"], near["layer"]) == (0, 3)
    assert 0 < near["tokens"] < near["decided"]
    same_receipt(one, other)


def logits(request: Found) -> torch.Tensor:
    return torch.tensor(request["logprobs"])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_writes_its_files_and_they_are_read_as_one(
    bench: Workbench, name: str, split: str, layout: str
) -> None:
    stored = bench.found(name, split)["stored"][layout]
    assert stored["statuses"] == dict.fromkeys(
        ["arrow", "filesystem", "inline"], ("ok", None)
    )
    root, stages = bench.root(name, split) / "files", SPLITS[split][1]
    assert all(Path(file).is_relative_to(root) for file in stored["files"])
    assert len(stored["files"]) == (len(TAPS) if layout == "per_file" else stages)
    assert all(Path(file).is_file() for file in stored["files"])
    rows = read_request(root, "t", layout)
    expected = bench.found(name, "one")["plain"][1]["rows"]
    assert rows.keys() == expected.keys() == TAPS
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4
        assert torch.equal(found, stored["inline"][tap])


@pytest.mark.parametrize("split", SPLITS)
def test_the_tables_of_all_stages_are_one_data_set(
    bench: Workbench, name: str, split: str
) -> None:
    stored = bench.found(name, split)["stored"]["packed"]
    assert len(stored["tables"]) == SPLITS[split][1]
    table = pyarrow.dataset.dataset(stored["tables"]).to_table()
    for (layer, hook), rows in stored["inline"].items():
        mask = (table["layer"].to_numpy() == layer) & (
            table["hook"].to_numpy(zero_copy_only=False) == hook
        )
        part = table.filter(pyarrow.array(mask)).sort_by("position")
        assert part["position"].to_pylist() == list(range(len(rows)))
        assert rows_of(part).tolist() == rows.tolist()
    assert table.num_rows == len(TAPS) * (PROMPT_LENGTHS[1] + NEW_TOKENS - 1)
    assert rows.shape[1] == HIDDEN


def test_upstream_still_cannot_load_the_hybrid_in_stages(bench: Workbench) -> None:
    assert ARCHITECTURES["hybrid"].not_in_stages is not None
    with pytest.raises(AssertionError, match=r"KeyError: 'layers\.\d"):
        bench.found("hybrid", "pipeline")
