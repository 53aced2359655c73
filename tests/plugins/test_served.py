# SPDX-License-Identifier: Apache-2.0
"""Packages with consumers: used unchanged by a server, over HTTP."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import llama
from tests.support.server import SHORT, Server
from vllm.interop.vllm_lens import Hook, VLLMLensClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [20, 30, 40, 50, 60, 70]


class Plugged:
    """A server with all packages, and the files that they write."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.log = folder / "log.jsonl"
        self.lines = folder / "rows.jsonl"
        model = llama(folder / "llama")
        consumers = [
            f"ref_sums:log={self.log},layers=[0,2]",
            f"ref_wishes:log={self.log}",
            f"ref_wishes:log={self.log},instance_name=others",
            "ref_reward:layer=1",
            f"ref_writer:log={self.log}",
            "ref_norms",
            "inline",
            "mean_norm",
            f"row_stream:to={self.lines}",
            "probe_trainer:layer=1",
        ]
        options = [
            part for entry in consumers for part in ("--capture-consumers", entry)
        ]
        self.server = Server(
            model,
            *options,
            *("--served-model-name", "tiny", "--dtype", "bfloat16", "--enforce-eager"),
            *("--max-model-len", "128", "--max-num-seqs", "4"),
            *("--vllm-lens-api", "--allow-remote-code-hooks"),
            *("--steering-api-key", "secret"),
            PYTHONPATH=str(installed),
        )

    def body(self, **capture: Any) -> dict[str, Any]:
        return {**SHORT, "prompt": PROMPT, "capture": capture, "capture_wait": True}

    def results(self, **capture: Any) -> dict[str, Any]:
        status, reply = self.server.post("/v1/completions", self.body(**capture))
        assert status == 200, reply
        found: dict[str, Any] = reply["capture_results"]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def plugged(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plugged]:
    opened = Plugged(tmp_path_factory.mktemp("served"), installed)
    yield opened
    opened.server.close()
    assert len(opened.events("shutdown")) == 1


def test_every_package_answers_in_one_response(plugged: Plugged) -> None:
    spec = {"hooks": {"post_block": [0]}, "positions": "all"}
    results = plugged.results(
        ref_wishes={"wish": "rain", "hooks": {"pre_attn": [1]}, "positions": [0, 3]},
        others={"wish": "sun", "fails": [1]},
        ref_reward={},
        ref_writer=spec,
        ref_norms=spec,
        mean_norm={"layers": [0]},
        row_stream=spec,
        probe_trainer={"label": 1},
    )
    failed = {n: r["error"] for n, r in results.items() if r["status"] != "ok"}
    assert failed.keys() == {"others"} and "makes me fail" in failed["others"]
    assert results["ref_sums"]["payload"] is None
    assert results["ref_reward"]["payload"]["rows"] == 4
    assert results["ref_writer"]["payload"] == ["10"]
    assert results["row_stream"]["payload"] == [10]
    (norms,) = results["ref_norms"]["payload"]
    assert (norms["layer"], norms["hook"]) == (0, "post_block")
    mean = results["mean_norm"]["payload"]["0"]
    assert mean == pytest.approx(sum(norms["value"]) / 10, rel=1e-3)
    assert results["probe_trainer"]["payload"]["probability"] == 0.5
    said = {
        (one["wish"], *one["key"][1:], one["rows"]) for one in plugged.events("wish")
    }
    others = {("sun", layer, "post_block", 6) for layer in (0, 2)}
    assert said == {("rain", 1, "pre_attn", 2), *others}
    assert [one["key"][1:] for one in plugged.events("error")] == [[1, "post_block"]]
    sums = plugged.events("sum")
    assert sorted(one["key"][1] for one in sums) == [0, 2]
    assert {one["internal"] for one in sums} == {one["key"][0] for one in sums}


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({"ref_wishes": 5}, "must be a dict, not int"),
        ({"ref_wishes": {"grumpy": True}}, "not today"),
        ({"ref_sums": {}}, "accepts no requests"),
        ({"mean_norm": {"layers": []}}, "layers from 0 to 2"),
        ({"probe_trainer": {"label": 7}}, "must be 0 or 1"),
        ({"row_stream": {"hooks": {"post_block": [9]}}}, "layer 9"),
    ],
)
def test_what_a_plug_in_refuses_is_a_bad_request(
    plugged: Plugged, capture: dict[str, Any], message: str
) -> None:
    status, reply = plugged.server.post("/v1/completions", plugged.body(**capture))
    assert status == 400
    assert message in reply["error"]["message"]


def test_a_stream_of_rows_can_be_read_while_it_is_served(plugged: Plugged) -> None:
    spec = {"hooks": {"post_block": [0]}, "positions": "all_generated"}
    body = plugged.body(row_stream=spec) | {"max_tokens": 60}
    before = len(plugged.lines.read_text()) if plugged.lines.exists() else 0
    seen = []
    for _ in plugged.server.stream("/v1/completions", body):
        text = plugged.lines.read_text() if plugged.lines.exists() else ""
        seen.append(text[before:].count('"data"'))
    assert 0 < seen[len(seen) // 2] < 59


def test_functions_of_clients_run_where_the_operator_allows_it(
    plugged: Plugged,
) -> None:
    client = VLLMLensClient(plugged.server.url, api_key="secret")
    assert "can run any code in its workers" in plugged.server.log.read_text()
    direction = torch.nn.functional.normalize(torch.arange(64.0), dim=0)

    def ablate(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        along = h.float() @ direction
        ctx.saved.setdefault("along", []).append(along)
        ctx.saved["kinds"] = [type(ctx.model).__name__, complex(1, 2)]
        return (h.float() - along[:, None] * direction).to(h.dtype)

    def look(ctx: Any, h: torch.Tensor) -> None:
        ctx.saved.setdefault("left", []).append(h.float() @ direction)

    hooks = [Hook(ablate, [1]), Hook(look, [2], pre=True)]
    found = client.generate(
        PROMPT, max_tokens=4, ignore_eos=True, capture_layers=[1], hooks=hooks
    )
    results = found.hook_results
    assert results is not None and found.activations is not None
    assert results["0"]["kinds"] == ["LlamaForCausalLM", complex(1, 2)]
    before, after = results["0"]["along"], results["1"]["left"]
    assert len(before[0]) == len(after[0]) == len(PROMPT)
    assert torch.cat(after).abs().max() < 0.02 * torch.cat(before).abs().max()
    stream = found.activations["residual_stream"][0].float()
    assert (stream @ direction).abs().max() < 0.02 * torch.cat(before).abs().max()


def test_code_that_fails_is_an_error_of_its_request(plugged: Plugged) -> None:
    client = VLLMLensClient(plugged.server.url)

    def fails(ctx: Any, h: torch.Tensor) -> None:
        raise LookupError("as it is meant to")

    broken = base64.b64encode(b"no pickle").decode()
    for fn, said in (
        (fails, "as it is meant to"),
        ({"cloudpickle": "%"}, "must be base64"),
        ({"cloudpickle": broken}, "cloudpickle|pickle|load"),
    ):
        with pytest.raises(RuntimeError, match=said):
            client.generate(PROMPT, max_tokens=2, hooks=[Hook(fn, [0])])
    assert client.generate(PROMPT, max_tokens=2).text
