# SPDX-License-Identifier: Apache-2.0
"""Several consumers in one engine: global specs, files, plug-ins, ready instances."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, Keeper, asking, prompt
from tests.support.hf_reference import relative_error
from tests.support.plugins import MEAN, install
from vllm import SamplingParams
from vllm.v1.capture.consumers.filesystem import read_request
from vllm.v1.capture.types import CaptureContext, CaptureSpec

pytestmark = pytest.mark.e2e


class Nothing(Keeper):
    """Accepts requests, and captures nothing of them."""

    instance_name = "nothing"

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        return CaptureSpec({"post_block": []}, "all")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def several(
    model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    packages = tmp_path_factory.mktemp("packages")
    install(packages, "plug_mean", MEAN, mean="plug_mean:Mean")
    sys.path.insert(0, str(packages))
    engine = CapturedEngine(
        model,
        keeper=Keeper(CaptureSpec({"post_block": [0]}, "last_prompt")),
        capture_consumers=[
            f"filesystem:root={root}",
            {"name": "mean", "instance_name": "twice", "params": {"scale": 2}},
            Nothing(),
        ],
    )
    yield engine
    engine.close()
    sys.path.remove(str(packages))


def params(**capture: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=4, temperature=0.0, ignore_eos=True, capture=capture or None
    )


def results(output: Any) -> dict[str, Any]:
    found: dict[str, Any] = output.capture_results
    return found


def test_a_global_spec_captures_of_every_request(several: CapturedEngine) -> None:
    (output,) = several.run([prompt(9, seed=500)], params())
    assert {n: r.status for n, r in results(output).items()} == {"keeper": "ok"}
    assert list(several.rows(output)) == [(0, "post_block")]
    several.check(output, [8])


def test_a_request_overrides_the_global_spec(several: CapturedEngine) -> None:
    (output,) = several.run([prompt(9, seed=501)], asking([0, 1], {"pre_attn": [2]}))
    assert list(several.rows(output)) == [(2, "pre_attn")]
    several.check(output, [0, 1])


def test_consumers_read_the_same_rows_at_other_positions(
    several: CapturedEngine, root: Path
) -> None:
    spec = {"request_id": "mine", "tag": "t", "hooks": {"post_block": [0, 1]}}
    (output,) = several.run(
        [prompt(9, seed=502)],
        params(
            filesystem=spec | {"positions": "all"},
            twice={"hooks": {"post_block": [0]}, "positions": "all_prompt"},
        ),
    )
    assert {n: r.status for n, r in results(output).items()} == {
        "filesystem": "ok",
        "keeper": "ok",
        "twice": "ok",
    }
    several.check(output, [8])
    expected = several.reference.stream(
        [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    )
    rows = read_request(root, "t", "mine")
    assert sorted(rows) == [(0, "post_block"), (1, "post_block")]
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4
    mean = torch.as_tensor(results(output)["twice"].payload)
    wanted = 2 * expected[0, "post_block"][:9].mean(0)
    assert torch.allclose(mean, wanted, rtol=1e-4, atol=1e-4)


def test_samples_have_files_of_their_own(several: CapturedEngine, root: Path) -> None:
    wish = {"request_id": "pair", "tag": "t", "hooks": {"pre_attn": [0]}}
    asked = params(filesystem=wish | {"positions": "all"})
    asked.n, asked.temperature = 2, 1.0
    (output,) = several.run([prompt(6, seed=504)], asked)
    assert results(output)["filesystem"].status == "ok"
    for sample in range(2):
        fed = [*output.prompt_token_ids, *output.outputs[sample].token_ids][:-1]
        expected = several.reference.stream(fed)[0, "pre_attn"]
        (found,) = read_request(root, "t", f"pair-{sample}").values()
        assert relative_error(found, expected) < 1e-4


def test_a_consumer_that_wants_no_rows_has_a_result(
    several: CapturedEngine,
) -> None:
    (output,) = several.run([prompt(9, seed=507)], params(nothing={}))
    found = {name: result.status for name, result in results(output).items()}
    assert found == {"keeper": "ok", "nothing": "not_requested"}
