# SPDX-License-Identifier: Apache-2.0
"""Several consumers of an installed package in one offline engine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_plugin import Norms

from tests.support.captured import CapturedEngine, prompt
from tests.support.models import llama
from vllm import RequestOutput, SamplingParams

pytestmark = pytest.mark.e2e


class Plugged:
    """An engine with all packages, and the files that they write."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.jsonl"
        self.norms = Norms(None, {})
        log = {"log": str(self.log)}
        self.engine = CapturedEngine(
            llama(folder / "llama"),
            capture_consumers=[
                {"name": "ref_sums", "params": log | {"layers": [0, 2]}},
                {"name": "ref_wishes", "params": log},
                {"name": "ref_wishes", "instance_name": "others", "params": log},
                {"name": "ref_reward", "params": {"layer": 1}},
                {"name": "ref_writer", "params": log},
                self.norms,
            ],
        )

    def run(self, ids: list[int], **capture: Any) -> RequestOutput:
        params = SamplingParams(
            max_tokens=5, temperature=0.0, ignore_eos=True, capture=capture or None
        )
        return self.engine.run([ids], params)[0]

    def stream(self, output: RequestOutput) -> dict[Any, torch.Tensor]:
        assert output.prompt_token_ids is not None
        fed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        return self.engine.reference.stream(fed)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    module = sys.modules[Norms.__module__]
    assert "installed" in str(module.__file__), "not the installed package"
    opened = Plugged(tmp_path_factory.mktemp("plugged"))
    yield opened
    opened.engine.close()


def results(output: RequestOutput) -> Any:
    return output.capture_results  # type: ignore[attr-defined]


def statuses(output: RequestOutput) -> dict[str, str]:
    return {name: result.status for name, result in results(output).items()}


def test_a_global_spec_gets_a_row_of_every_request(plugged: Plugged) -> None:
    output = plugged.run(prompt(7, seed=1))
    assert statuses(output) == {"ref_sums": "ok"}
    assert results(output)["ref_sums"].payload is None
    stream = plugged.stream(output)
    first, second = sorted(plugged.events("sum")[-2:], key=lambda e: e["key"])
    assert [first["key"][1:], second["key"][1:]] == [
        [0, "post_block"],
        [2, "post_block"],
    ]
    assert first["client"] == output.request_id
    assert first["internal"] == first["key"][0]
    wanted = float(stream[0, "post_block"][6].double().sum())
    assert first["sum"] == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_the_spec_of_a_request_is_known_where_its_rows_arrive(plugged: Plugged) -> None:
    output = plugged.run(prompt(6, seed=2), ref_wishes={"wish": "snow"})
    assert statuses(output) == {"ref_sums": "ok", "ref_wishes": "ok"}
    events = sorted(plugged.events("wish")[-3:], key=lambda event: event["key"])
    assert [e["key"][1:] for e in events] == [[n, "post_block"] for n in range(3)]
    assert [(e["rows"], e["wish"]) for e in events] == [(6, "snow")] * 3


def test_instances_of_one_consumer_are_independent(plugged: Plugged) -> None:
    spec = {"hooks": {"pre_attn": [1]}, "positions": [0, 3]}
    output = plugged.run(
        prompt(6, seed=3),
        ref_wishes={"wish": "a"} | spec,
        others={"wish": "b", "fails": [2], "hooks": {"post_attn": [0, 2]}},
    )
    assert statuses(output)["ref_wishes"] == "ok"
    assert results(output)["others"].status == "partial_error"
    assert "layer 2 makes me fail" in results(output)["others"].error
    assert plugged.events("error")[-1]["key"][1:] == [2, "post_attn"]
    said = {(e["wish"], *e["key"][1:], e["rows"]) for e in plugged.events("wish")[-2:]}
    assert said == {("a", 1, "pre_attn", 2), ("b", 0, "post_attn", 6)}


def test_a_sink_may_answer_at_once(plugged: Plugged) -> None:
    output = plugged.run(prompt(6, seed=4), ref_reward={})
    reward = results(output)["ref_reward"].payload
    rows = plugged.stream(output)[1, "post_block"][6:]
    assert reward["rows"] == len(rows) == 4
    assert reward["reward"] == pytest.approx(float(rows.mean()), abs=1e-3)


def test_a_sink_may_answer_later(plugged: Plugged) -> None:
    spec = {"hooks": {"post_attn": [0, 1]}, "positions": "all"}
    output = plugged.run(prompt(6, seed=5), ref_writer=spec)
    assert results(output)["ref_writer"].status == "ok"
    assert results(output)["ref_writer"].payload == ["10", "10"]
    assert [e["rows"] for e in plugged.events("written")[-2:]] == [10, 10]


def test_a_ready_instance_gets_its_rows_here(plugged: Plugged) -> None:
    spec = {"hooks": {"post_block": [0, 2]}, "positions": "all"}
    output = plugged.run(prompt(6, seed=6), Norms=spec)
    payload = results(output)["Norms"].payload
    assert payload == plugged.norms.norms
    stream = plugged.stream(output)
    for tap, norms in payload.items():
        assert norms == pytest.approx(stream[tap].norm(dim=-1).tolist(), rel=1e-3)


def test_consumers_are_shut_down_with_the_engine(plugged: Plugged) -> None:
    # The last test: nothing can be captured after it.
    plugged.engine.llm.llm_engine.engine_core.shutdown()
    assert len(plugged.events("shutdown")) == 1
