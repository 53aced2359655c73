# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM` over two pipeline stages, or two data-parallel engines.

Each request has its own rows of all layers, also in outputs before the last.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.serve import EVERYWHERE, NEW_TOKENS, Order, run
from tests.support.hf_reference import Reference, relative_error
from tests.support.models import llama
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

LAYERS = 3
TAPS = {(layer, hook) for layer in range(LAYERS) for hook in EVERYWHERE}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module", params=["pipeline", "data"])
def found(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    folder = tmp_path_factory.mktemp(request.param)
    return run(Order(str(model), str(folder), **{request.param: 2}))


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
