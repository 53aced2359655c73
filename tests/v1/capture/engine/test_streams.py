# SPDX-License-Identifier: Apache-2.0
"""A residual of several streams (Gemma 3n, compiled): read, written, and refused.

The parity suite compares the rows with the library's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.captured import (
    LOGITS,
    CapturedEngine,
    asking_logits,
    logprobs_of,
)
from tests.support.models import SIZES, save
from vllm import RequestOutput
from vllm.v1.capture.consumers.filesystem.reader import read_request
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS, WIDTH, STREAMS, LAYERS = 256, 64, 4, 2
PROMPT, OTHER = [5, 9, 3, 77, 21, 8], [9, 101, 3, 7, 65, 18]
EVERYWHERE = {"streams_pre": "all", "streams_post": "all"}


class Engine:
    def __init__(self, folder: Path) -> None:
        config = transformers.Gemma3nTextConfig(
            **SIZES,
            vocab_size_per_layer_input=WORDS,
            hidden_size_per_layer_input=16,
            layer_types=["full_attention"] * LAYERS,
            num_kv_shared_layers=1,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * LAYERS,
        )
        self.folder = folder
        self.captured = CapturedEngine(
            save(config, folder / "model"),
            reference=object(),
            enforce_eager=False,
            max_num_batched_tokens=64,
            enable_readouts=True,
            hook_points=["z", "embed", "attn_add", "after"],
            **LOGITS,
            capture_consumers=["inline", f"filesystem:root={folder / 'files'}"],
        )
        self.config = self.captured.llm.llm_engine.vllm_config.capture_config

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> RequestOutput:
        params = asking_logits(3, hooks=EVERYWHERE, **fields)
        (output,) = self.captured.run([prompt], params)
        return output

    def rows(self, output: RequestOutput) -> dict[tuple[int, str], torch.Tensor]:
        return self.captured.rows(output)


def logits(output: RequestOutput) -> torch.Tensor:
    return logprobs_of(output, WORDS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = Engine(tmp_path_factory.mktemp("streams"))
    yield opened
    opened.captured.close()


def test_a_row_has_all_streams_and_a_layer_no_other_point_of_the_stream(
    engine: Engine,
) -> None:
    points = engine.config.hook_points or {}
    assert {"streams_pre", "streams_post", "z"} == set(points[0])
    shape = (STREAMS * WIDTH, STREAMS)
    assert engine.config.point_shapes[1]["streams_post"] == shape
    rows = engine.rows(engine.ask())
    assert {one.shape for one in rows.values()} == {(8, STREAMS * WIDTH)}
    streams = rows[0, "streams_pre"].view(-1, STREAMS, WIDTH)
    assert not torch.allclose(streams[:, 0], streams[:, 1], atol=1e-2)
    for layer in range(LAYERS - 1):
        leaving, entering = rows[layer, "streams_post"], rows[layer + 1, "streams_pre"]
        assert torch.equal(leaving, entering)
        assert not torch.equal(leaving, rows[layer, "streams_pre"])


def test_files_have_the_streams_that_are_named_as_heads(engine: Engine) -> None:
    spec = {"hooks": {"streams_post": [1]}, "positions": "all_prompt"}
    output = engine.ask(
        capture={
            "inline": spec,
            "filesystem": {**spec, "heads": [3, 0], "request_id": "some"},
        },
        capture_wait=True,
    )
    whole = output.capture_results["inline"].payload[1, "streams_post"]
    (folder,) = (engine.folder / "files").glob("*/some")
    entry = read_request(folder)[1, "streams_post"]
    kept = whole.view(-1, STREAMS, WIDTH)[:, [3, 0]].flatten(1)
    assert torch.equal(torch.as_tensor(entry.array), kept)


def test_the_last_streams_of_another_run_give_its_logits(engine: Engine) -> None:
    other = engine.ask(OTHER)
    row = engine.rows(other)[LAYERS - 1, "streams_post"][len(OTHER) - 1]
    at = {"positions": [len(PROMPT) - 1]}
    whole = {"op": "replace", "vector": row.tolist(), **at}
    changed = engine.ask(steering_vectors={"streams_post": {LAYERS - 1: whole}})
    assert torch.allclose(logits(changed)[0], logits(other)[0], atol=1e-4)
    assert not torch.allclose(logits(engine.ask())[0], logits(other)[0], atol=1e-1)


def test_an_entry_for_one_stream_leaves_the_others(engine: Engine) -> None:
    entry = {"vector": [1.0] * WIDTH, "heads": [2]}
    spec = {"hooks": {"streams_pre": [1]}, "positions": "all_prompt"}
    asked = {"keeper": {**spec, "after": True}, "inline": spec}
    output = engine.ask(
        capture=asked,
        capture_wait=True,
        steering_vectors={"streams_pre": {1: entry}},
    )
    before = output.capture_results["inline"].payload[1, "streams_pre"]
    behind = engine.rows(output)[1, "streams_pre"]
    expected = torch.zeros(STREAMS, WIDTH)
    expected[2] = 1.0
    change = (behind - before).view(-1, STREAMS, WIDTH)
    assert torch.allclose(change, expected.expand_as(change), atol=1e-5)
    assert not torch.allclose(logits(output), logits(engine.ask()), atol=1e-2)


def test_probes_read_all_streams_or_some(engine: Engine) -> None:
    vector = torch.randn(STREAMS * WIDTH, generator=torch.Generator().manual_seed(1))
    place = {"layer": LAYERS - 1, "hook": "streams_post", "positions": "all"}
    output = engine.ask(
        readouts={
            "whole": {"kind": "probe", "vectors": [vector.tolist()], **place},
            "one": {
                "kind": "probe",
                "vectors": [vector[:WIDTH].tolist()],
                "heads": [1],
                **place,
            },
        }
    )
    rows = engine.rows(output)[LAYERS - 1, "streams_post"]
    found = {
        name: torch.as_tensor(output.readouts[name]["values"]).flatten()
        for name in ("whole", "one")
    }
    assert torch.allclose(found["whole"], rows @ vector, rtol=1e-4, atol=1e-3)
    second = rows.view(-1, STREAMS, WIDTH)[:, 1] @ vector[:WIDTH]
    assert torch.allclose(found["one"], second, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("hook", ["post_block", "pre_attn", "embed", "attn_add"])
def test_points_of_a_single_stream_are_refused_with_the_reason(
    engine: Engine, hook: str
) -> None:
    spec = {"hooks": {hook: [0]}, "positions": "all"}
    for fields, kind in (
        ({"capture": {"keeper": spec}}, CaptureValidationError),
        ({"steering_vectors": {hook: {0: [0.0] * WIDTH}}}, SteeringValidationError),
    ):
        with pytest.raises(kind, match="several streams; streams_pre and streams_post"):
            engine.ask(**fields)


def test_other_bad_requests_are_refused(engine: Engine) -> None:
    with pytest.raises(SteeringValidationError, match=str(STREAMS * WIDTH)):
        engine.ask(steering_vectors={"streams_post": {0: [0.0] * WIDTH}})
    for readout in (
        {"kind": "lens"},
        {"kind": "lens", "hook": "streams_post"},
        {"kind": "attribution", "tokens": [1]},
    ):
        with pytest.raises(ReadoutValidationError, match="several streams"):
            engine.ask(readouts={"r": readout})
