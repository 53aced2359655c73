# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM` over two pipeline stages, or data-parallel engines of one or two ranks.

Each request has its own rows of all layers, also in outputs before the last.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.architectures import ARCHITECTURES, LAYERS
from tests.multiprocess.compare import same_hooks, same_readouts, same_receipt
from tests.multiprocess.observe import EVERYWHERE, NEW_TOKENS
from tests.multiprocess.serve import (
    Order,
    featured_requests,
    run,
)
from tests.support.hf_reference import Reference, relative_error
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

TAPS = {(layer, hook) for layer in range(LAYERS) for hook in EVERYWHERE}
Found = dict[str, Any]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline": ("llama", {"pipeline": 2}),
    "data": ("llama", {"data": 2}),
    "both": ("llama", {"data": 2, "tensor": 2}),
    "experts": ("experts", {"data": 2, "experts": True}),
}
"""The model, and how it is split."""


class Bench:
    """Models and engines' results, each computed once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._models: dict[str, Path] = {}
        self._wholes: dict[str, Found] = {}

    def model(self, name: str) -> Path:
        if name not in self._models:
            folder = self._factory.mktemp(name)
            self._models[name] = ARCHITECTURES[name].save(folder / "model")
        return self._models[name]

    def run(self, name: str, **split: Any) -> Found:
        folder = self._factory.mktemp(f"{name}-run")
        return run(Order(str(self.model(name)), str(folder), **split), timeout=1500)

    def whole(self, name: str) -> Found:
        """The results of one process."""
        if name not in self._wholes:
            self._wholes[name] = self.run(name)
        return self._wholes[name]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def reference(bench: Bench, case: str) -> Reference:
    return Reference(bench.model(CASES[case][0]))


@pytest.fixture(scope="module")
def found(bench: Bench, case: str) -> Found:
    name, split = CASES[case]
    return bench.run(name, **split)


def fed(answer: Found) -> list[int]:
    return [*answer["prompt"], *answer["outputs"][-1]["tokens"]][:-1]


def test_each_request_has_its_own_rows_at_every_consumer(
    found: Found, reference: Reference
) -> None:
    assert found["kept"] == len(found["answers"])
    for number, answer in enumerate(found["answers"]):
        last = answer["outputs"][-1]
        assert {status for status, _ in last["statuses"].values()} == {"ok"}, last
        assert len(last["tokens"]) == NEW_TOKENS
        expected = reference.stream(fed(answer))
        (folder,) = {Path(path).parent for path in answer["files"]}
        tag = folder.parent
        assert tag.name == f"r{number}"
        stored = read_request(tag.parent, tag.name, folder.name)
        assert last["rows"].keys() == answer["kept"].keys() == stored.keys() == TAPS
        for tap in TAPS:
            assert relative_error(last["rows"][tap], expected[tap]) < 1e-4, tap
            assert torch.equal(answer["kept"][tap], last["rows"][tap])
            assert torch.equal(stored[tap], last["rows"][tap])


def test_outputs_before_the_last_carry_rows_of_all_layers_once(found: Found) -> None:
    seen: dict[Any, set[int]] = {tap: set() for tap in TAPS}
    for answer in found["answers"]:
        *before, last = answer["outputs"]
        for output in before:
            assert output["statuses"]["inline"] == ("pending", None)
            for tap, rows in output["rows"].items():
                assert output["positions"][tap] == list(range(len(rows)))
                assert torch.equal(rows, last["rows"][tap][: len(rows)])
                assert len(rows) <= len(answer["prompt"]) + len(output["tokens"]) - 1
                seen[tap].add(len(rows))
    # Token by token, from the layers of every process.
    assert all(len(counts) > 3 for counts in seen.values()), seen


def test_every_output_carries_the_readouts_of_its_tokens(found: Found) -> None:
    """Of all layers: those of the rows that a consumer captures."""
    for answer in found["answers"]:
        last = answer["outputs"][-1]
        taps = [(layer, "post_block") for layer in range(LAYERS)]
        rows = torch.stack([last["rows"][tap] for tap in taps], dim=1)
        for output in answer["outputs"]:
            read, norms = output["readouts"]["rows"], output["readouts"]["norms"]
            count = len(answer["prompt"]) + len(output["tokens"]) - 1
            assert read.error is None and norms.error is None
            assert read.positions == list(range(count)) and list(read.taps) == taps
            assert torch.equal(torch.from_numpy(read["rows"]), rows[:count])
            own = rows[len(answer["prompt"]) : count]
            assert len(norms.positions) == len(own)
            if not norms.positions:  # The first token has no row yet.
                continue
            assert norms["norm"].shape == own.shape[:2]
            torch.testing.assert_close(
                torch.from_numpy(norms["norm"]), own.norm(dim=-1)
            )
            before = torch.cosine_similarity(own[:, 1:], own[:, :-1], dim=-1)
            torch.testing.assert_close(torch.from_numpy(norms["cosine"][:, 1:]), before)


def test_nothing_is_left_in_flight(found: Found) -> None:
    assert found["counters"]["requests_in_flight"] == 0


def test_every_feature_does_what_it_does_in_one_process(
    bench: Bench, case: str, found: Found
) -> None:
    whole = bench.whole(CASES[case][0])["featured"]
    assert len(whole) == len(found["featured"]) == len(featured_requests())
    plain = torch.tensor(found["featured"][0]["logprobs"])
    for number, (one, other) in enumerate(zip(whole, found["featured"], strict=True)):
        assert other["tokens"] == one["tokens"], number
        logprobs = torch.tensor(other["logprobs"])
        assert relative_error(logprobs, torch.tensor(one["logprobs"])) < 1e-4, number
        assert not one["errors"] and not other["errors"]
        same_readouts(one["arrays"], other["arrays"])
        same_receipt(one["receipt"], other["receipt"])
        same_hooks(one["hooks"], other["hooks"])
        if number and not one["arrays"]:
            assert relative_error(logprobs, plain) > 1e-3, number
    for kind in ("arrays", "receipt", "hooks"):
        assert sum(bool(one[kind]) for one in whole) == 2, kind


def test_rows_that_one_engine_kept_replace_those_of_requests_at_each(
    bench: Bench, case: str, found: Found
) -> None:
    _, *whole = bench.whole(CASES[case][0])["patched"]
    plain, *patched = (torch.tensor(one["logprobs"]) for one in found["patched"])
    assert relative_error(patched[0], plain) > 1e-3
    for one, other in zip(whole, patched, strict=True):
        assert relative_error(other, torch.tensor(one["logprobs"])) < 1e-4
