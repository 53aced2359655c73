# SPDX-License-Identifier: Apache-2.0
"""Several consumers in one engine: global specs, files, plug-ins, ready instances."""

import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, Keeper, asking, prompt
from tests.support.hf_reference import relative_error
from tests.support.plugins import MEAN, install
from vllm import SamplingParams
from vllm.v1.capture.consumers.filesystem import (
    FilesystemCaptureRequest,
    read_request,
)
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)

pytestmark = pytest.mark.e2e


class Stream:
    """A ready sink that receives rows before they are known to be valid."""

    location = "driver"
    reads_client_spec = True
    truncates = True
    instance_name = "stream"

    def __init__(self) -> None:
        self.chunks: list[CaptureChunk] = []
        self.results: dict[CaptureKey, CaptureResult] = {}

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        self.chunks.clear()
        return parse_spec(raw, ctx, "capture.stream")

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        self.chunks.append(chunk)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        counting = finalize.sidecar["num_rows"]
        result = CaptureResult(finalize.key, "ok", payload={"counting": counting})
        self.results[finalize.key] = result

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        return self.results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        pass


class Nothing(Keeper):
    """Accepts requests, and captures nothing of them."""

    instance_name = "nothing"

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        return CaptureSpec({"post_block": []}, "all")


STREAM = Stream()


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
            "memory",
            STREAM,
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


def test_rows_stay_until_they_are_dropped(several: CapturedEngine) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 7)]
    spec = {"hooks": {"post_block": [1]}, "positions": "all_prompt"}
    several.run(prompts, params(memory=spec | {"name": "kept"}))
    kept = several.llm.captured("kept")
    for one, tokens in zip(kept, prompts, strict=True):
        expected = several.reference.stream(tokens)[1, "post_block"]
        assert relative_error(one.rows[1, "post_block"], expected) < 1e-4
    assert several.llm.captured()["names"]["kept"]["requests"] == 2
    assert several.llm.drop_captured("kept")["rows"] == 12
    with pytest.raises(ValueError, match="no rows are kept under this name"):
        several.llm.captured("kept")


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


def test_a_request_may_be_given_as_a_dataclass(
    several: CapturedEngine, root: Path
) -> None:
    wish = FilesystemCaptureRequest(
        request_id="typed", tag="t", hooks={"pre_attn": "all"}, positions="all_prompt"
    )
    (output,) = several.run([prompt(6, seed=503)], params(filesystem=wish))
    assert results(output)["filesystem"].status == "ok"
    rows = read_request(root, "t", "typed")
    assert {tap: tuple(r.shape) for tap, r in rows.items()} == {
        (layer, "pre_attn"): (6, 64) for layer in range(3)
    }


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


def test_a_ready_sink_gets_rows_while_they_are_computed(
    several: CapturedEngine,
) -> None:
    spec = {"hooks": {"post_block": [1]}, "positions": "all"}
    asked = params(stream=spec)
    (output,) = several.run([prompt(9, seed=506)], asked)
    result = results(output)["stream"]
    assert result.status == "ok" and result.payload == {"counting": 12}
    parts = [chunk.metadata["positions"] for chunk in STREAM.chunks]
    assert len(parts) >= 3, "rows came only at the end"
    assert [p for part in parts for p in part][:12] == list(range(12))
    fed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    expected = several.reference.stream(fed)[1, "post_block"]
    rows = torch.cat([chunk.tensor for chunk in STREAM.chunks])[:12]
    assert relative_error(rows, expected) < 1e-4


def test_a_consumer_that_wants_no_rows_has_a_result(
    several: CapturedEngine,
) -> None:
    (output,) = several.run([prompt(9, seed=507)], params(nothing={}))
    found = {name: result.status for name, result in results(output).items()}
    assert found == {"keeper": "ok", "nothing": "not_requested"}


def test_requests_of_one_call_cannot_share_a_request_id(
    several: CapturedEngine, root: Path
) -> None:
    spec = {"request_id": "shared", "tag": "t", "hooks": {"post_block": [0]}}
    asked = params(filesystem=spec | {"positions": "all_prompt"})
    with pytest.raises(ValueError, match="request_id: a request in flight"):
        several.run([prompt(9, seed=520), prompt(5, seed=521)], asked)
    capture = several.llm.llm_engine.capture  # type: ignore[attr-defined]
    for _ in range(100):  # The first one was aborted, which takes a moment.
        if not capture.describe()["counters"]["requests_in_flight"]:
            break
        sleep(0.1)
    (output,) = several.run([prompt(5, seed=521)], asked)
    assert results(output)["filesystem"].status == "ok"
    assert read_request(root, "t", "shared")[0, "post_block"].shape == (5, 64)
