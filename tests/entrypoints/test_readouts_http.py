# SPDX-License-Identifier: Apache-2.0
"""Readouts over HTTP: responses, streams, named modules, refusals."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clearbox_client import ClearboxError, Client, paired
from clearbox_client.payloads import decode

from tests.support.browser import opened
from tests.support.server import SHORT, Server
from tests.support.waiting import until
from tests.v1.readouts._reading import HIDDEN, draw
from vllm.capture_dataset import load_dataset, remote
from vllm.capture_dataset.collect import collect
from vllm.capture_dataset.plan import Plan
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.servers import ServersRunner
from vllm.capture_dataset.spec import OutputSpec, RowsSpec, SourceSpec
from vllm.capture_dataset.survey import Survey
from vllm.interop.vllm_lens import Hook, VLLMLensClient
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.readouts.modules import save_probe

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = {"Authorization": "Bearer secret"}


def body(**more: Any) -> dict[str, Any]:
    return {**SHORT, "prompt": [20, 30, 40, 50], "max_tokens": 6, **more}


PROBE = {"kind": "probe", "probe": "direction"}
SPEC = {
    "p": PROBE,
    "lens": {"kind": "lens", "layers": [2], "top_k": 2, "positions": "last_prompt"},
    "sae": {"kind": "sae", "sae": "jump", "top_k": 4},
    "mean": {
        "kind": "rows",
        "hooks": {"post_block": [1]},
        "positions": "all_prompt",
        "reduce": "mean",
    },
    "norm": {"kind": "norm", "hooks": {"post_block": [0]}},
}


def test_a_response_carries_every_kind(server: Server) -> None:
    asked = body(readouts=SPEC, capture={"inline": {"readouts": ["lens", "norm"]}})
    reply = server.post("/v1/completions", asked)
    assert reply.status == 200, reply
    found = reply.body["readouts"]
    assert found["p"]["positions"] == [4, 5, 6, 7, 8]
    assert np.shape(found["p"]["values"]) == (5, 2)
    assert np.shape(found["lens"]["token_ids"]) == (1, 1, 2)
    assert np.shape(found["sae"]["features"]) == (5, 4)
    assert found["norm"]["cosine"] == [[None]] * 5
    rows = found["mean"]["rows"]
    data = np.frombuffer(base64.b64decode(rows["data"]), dtype=rows["dtype"])
    assert (rows["shape"], data.size) == ([1, HIDDEN], HIDDEN)
    taken = decode(reply.body["capture_results"]["inline"]["payload"])
    lens = taken[2, "post_block.lens.token_ids"]
    assert lens.tolist() == [found["lens"]["token_ids"][0][0]]
    norms = [one[0] for one in found["norm"]["norm"]]
    assert np.allclose(taken[0, "post_block.norm.norm"][:, 0], norms)


def test_rows_are_kept_where_a_readout_fires(server: Server) -> None:
    keep = {"readout": "n", "above": 0, "scope": "token"}
    rows = {"hooks": {"post_block": [0, 1]}, "positions": "all", "keep_when": keep}
    norm = {"kind": "norm", "hooks": {"post_block": [1]}, "positions": [1]}
    asked = body(readouts={"n": norm}, capture={"inline": rows})
    reply = server.post("/v1/completions", asked)
    told = reply.body["capture_results"]["inline"]
    assert (
        told["kept"] == 2 and [one["positions"] for one in told["payload"]] == [[1]] * 2
    )
    counted = r'^vllm:capture_kept_rows_total\{consumer="inline",[^}]*\} 2\.0$'
    until(lambda: re.search(counted, server.get("/metrics").body, re.MULTILINE))
    refused = server.post(
        "/v1/completions", asked | {"stream": True, "capture_stream": True}
    )
    assert "set capture_stream=False" in str(refused.body)
    rows = rows | {"name": "quiet", "keep_when": {"readout": "n", "below": 0}}
    asked |= {"capture": {"memory": rows}, "capture_wait": True}
    told = server.post("/v1/completions", asked).body["capture_results"]["memory"]
    assert (told["status"], told["kept"], told["payload"]) == ("ok", 0, None)
    status, told = server.get("/v1/capture/memory/quiet?instance=memory")
    assert status == 404 and "keep_when of its request did not fire" in str(told)


def test_choices_have_their_own_under_their_index(server: Server) -> None:
    several = body(readouts={"p": PROBE}, prompt=[[20, 30], [40, 50, 60]])
    found = server.post("/v1/completions", several).body["readouts"]
    assert found["0"]["p"]["positions"][0] == 2
    assert found["1"]["p"]["positions"][0] == 3


def test_a_readout_of_what_its_request_changes_says_so(server: Server) -> None:
    change = {"post_block": {"2": {"vector": [1.0] * HIDDEN}}}
    asked = body(readouts=SPEC, steering_vectors=change, stream=True)
    *_, last = [one["readouts"] for one in server.stream("/v1/completions", asked)][-1:]
    noted = {name: one["note"] for name, one in last.items() if "note" in one}
    assert list(noted) == ["lens"] and "changes post_block of layer 2" in noted["lens"]


def test_chat_reads_out_and_stops(server: Server) -> None:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "temperature": 0.0,
        "readouts": {"p": PROBE},
        "stop_when": [{"readout": "p", "above": -1e9}],
        "chat_template": "{{ messages[0].content }}",
    }
    reply = server.post("/v1/chat/completions", chat)
    assert reply.status == 200, reply
    (choice,) = reply.body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "readout:p"
    assert reply.body["usage"]["completion_tokens"] == 1
    assert len(reply.body["readouts"]["p"]["positions"]) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"readouts": {"p": {"kind": "prob"}}}, "readouts.p.kind"),
        ({"readouts": {"p": PROBE | {"probe": "nobody"}}}, "direction"),
        ({"readouts": {"p": PROBE | {"layr": 1}}}, "layr"),
        ({"readouts": {"p": {"kind": "probe", "layer": 1, "vectors": [1, 2]}}}, "64"),
        ({"readouts": {"l": {"kind": "lens", "top_k": 100}}}, "0 to 64"),
        ({"readouts": {"l": {"kind": "lens", "layers": [9]}}}, "layers"),
        ({"readouts": {"s": {"kind": "sae", "sae": "jump", "features": [999]}}}, "199"),
        ({"readouts": {"c": {"kind": "custom", "name": "nobody"}}}, "vllm.readouts"),
        ({"readouts": {}}, "1 to 64"),
        ({"readouts": {"p": PROBE}, "stop_when": [{"readout": "q"}]}, "no readout"),
        (
            {"readouts": {"p": PROBE}, "stop_when": [{"readout": "p", "index": 2}]},
            "above, below",
        ),
        ({"stop_when": [{"readout": "p", "above": 1}]}, "stop_when compares readouts"),
        ({"readouts": {"p": PROBE}, "stop_when": {}}, 'needs a "readout"'),
        ({"readouts": {"n": {"kind": "norm", "hooks": {"layers.1": [1]}}}}, "you mean"),
        ({"readouts": {"p": PROBE}, "stop_whem": []}, "stop_when"),
        ({"readouts": {"p": PROBE | {"layer": 9}}}, "readouts.p.layer: layer 9"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(
    server: Server, fields: dict[str, Any], said: str
) -> None:
    asked = body(**fields)
    del asked["model"]
    with Client(server.url) as client, pytest.raises(ClearboxError) as caught:
        client.complete(asked.pop("prompt"), **asked)
    error = caught.value
    assert error.status == 400 and said in error.message
    assert error.parameter and error.remedy


def test_modules_are_named_and_forgotten(server: Server, folder: Path) -> None:
    path = folder / "later.safetensors"
    save_probe(path, draw(1, HIDDEN), layer=0)
    route = "/v1/readouts/modules"
    named = {"name": "later", "path": str(path), "replace": None}
    unkeyed = server.post(f"{route}/register", named)
    assert unkeyed.status == 401 and "--steering-api-key" in unkeyed.body["error"]
    assert server.post(f"{route}/register", named, **KEY).status == 200
    assert server.post(f"{route}/register", named, **KEY).status == 400
    assert set(server.get(route).body["modules"]) == {"direction", "later"}
    asked = body(readouts={"p": PROBE | {"probe": "later"}})
    assert server.post("/v1/completions", asked).status == 200
    for more in ({"layer": 1}, {"hook": "post_attn"}, {"hook": "post_block.1"}):
        given = named | {"name": "other"} | more
        refused = server.post(f"{route}/register", given, **KEY)
        assert refused.status == 400 and "layer" in str(refused.body), "not ignored"
    of_saes = server.post("/v1/sae/unregister", {"name": "later"}, **KEY)
    assert of_saes.status == 400 and "no SAE 'later'" in str(of_saes.body)
    missing = server.post(f"{route}/register", {"name": "x", "path": "/none"}, **KEY)
    assert missing.body["error"]["param"] == "path"
    assert missing.body["error"]["message"].count("parameter=") == 1
    assert server.post(f"{route}/unregister", {"name": "later"}, **KEY).status == 200
    assert server.post("/v1/completions", asked).status == 400
    foreign = str(folder / "foreign.safetensors")
    save_probe(foreign, draw(1, HIDDEN), layer=0, metadata={"model": "org/other"})
    for added in ({}, {"replace": True}):
        named = {"name": "foreign", "path": foreign, **added}
        refused = server.post(f"{route}/register", named, **KEY)
        assert refused.status == 400 and "org/other" in str(refused.body)
    assert set(server.get(route).body["modules"]) == {"direction"}


def test_the_client_names_and_forgets_modules(server: Server, folder: Path) -> None:
    path = folder / "named.safetensors"
    save_probe(path, draw(1, HIDDEN), layer=0)
    with Client(server.url) as client:
        client.register_probe("named", str(path), key="secret")
        client.register_probe("named", str(path), replace=True, key="secret")
        with pytest.raises(ClearboxError):
            client.register_probe("named", str(path), key="secret")
        client.register_sae("sparse", str(folder / "topk"), key="secret")
        having = client.readouts()["modules"]
        assert having["named"]["kind"] == "probe" and having["sparse"]["kind"] == "sae"
        for name in ("named", "sparse"):
            client.unregister_readout(name, key="secret")
        assert not {"named", "sparse"} & client.readouts()["modules"].keys()


def test_saes_have_routes_of_their_own(server: Server, folder: Path) -> None:
    assert server.get("/v1/sae").body["modules"]["jump"]["features"] == 200
    use = {"op": "feature", "sae": "jump", "feature": 3, "value": 9.0}
    steered = body(steering_vectors={"post_block": {"1": use}}, steering_receipt=True)
    reply = server.post("/v1/completions", steered)
    assert reply.status == 200, "an SAE that was named at the start steers"
    assert reply.body["steering"]["applied"][0]["dose"]["mean"] > 0
    named = {"name": "topk", "path": str(folder / "topk")}
    wrong = {"name": "no", "path": str(folder / "direction.safetensors")}
    assert server.post("/v1/sae/register", wrong, **KEY).status == 400
    for place in ({"hook": "post_attn"}, {"layer": 9}, {"layer": 1, "hook": "x"}):
        refused = server.post("/v1/sae/register", named | place, **KEY)
        assert refused.status == 400, place
    assert server.post("/v1/sae/register", named, **KEY).status == 200
    sae = {"s": {"kind": "sae", "sae": "topk", "top_k": 3}}
    assert server.post("/v1/completions", body(readouts=sae)).status == 200
    assert server.post("/v1/sae/unregister", {"name": "topk"}, **KEY).status == 200


def test_changes_by_a_consumer_while_serving_are_listed(server: Server) -> None:
    def told() -> dict[str, Any]:
        found = server.get("/v1/steering/dynamic").body
        assert found["determinism"] == {"consistent": True}
        (worker,) = found["workers"]
        assert worker["steering_initialized"] and worker["tp_rank"] == 0
        return dict(worker)

    def text(**more: Any) -> str:
        reply = server.post("/v1/completions", body(**more))
        assert reply.status == 200, reply
        return str(reply.body["choices"][0]["text"])

    before, plain = told(), text()
    assert before["sync_consumers"]["guard"]["triggers"] == 0
    assert text(conversation_id="a") != plain
    assert text(conversation_id="a") != plain
    assert text() == plain
    after = told()
    guard = after["sync_consumers"]["guard"]
    assert (guard["triggers"], guard["latched_conversations"]) == (1, 1)
    assert guard["bridges"] == 1
    applied = after["action_queue"]["applied"] - before["action_queue"]["applied"]
    assert applied == 2 and not after["rejections"]
    assert after["dynamic_tier"]["active"] is False
    assert after["dynamic_pool"]["overrides"] == []


def test_token_in_responses_carry_readouts_and_receipts(server: Server) -> None:
    vector = {"post_block": {"1": [1.0] * HIDDEN}}
    fields: dict[str, Any] = {"readouts": {"p": PROBE}, "steering_vectors": vector}
    fields["steering_receipt"] = True
    whole = server.post("/v1/completions", body(**fields)).body
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **fields}
    asked = {"token_ids": body()["prompt"], "sampling_params": sampling}
    reply = server.post("/inference/v1/generate", asked)
    assert reply.status == 200, reply
    assert (
        reply.body["readouts"]["p"]["positions"] == whole["readouts"]["p"]["positions"]
    )
    (entry,) = reply.body["steering"]["applied"]
    assert entry["tokens"] == whole["steering"]["applied"][0]["tokens"] == 9
    chunks = list(server.stream("/inference/v1/generate", {**asked, "stream": True}))
    assert [one["steering"] for one in chunks if "steering" in one]
    assert sum("readouts" in one for one in chunks) > 2


def test_what_was_read_out_is_counted(server: Server) -> None:
    told = server.get("/v1/readouts").body
    assert told["enabled"] is True
    assert told["counters"]["probe"]["rows"] > 0
    assert told["counters"]["rows"]["rows"] > 0, "reduced rows count as well"
    assert "direction" in told["modules"]
    # Workers report every second.
    until(lambda: exported_rows(server, "probe") == told["counters"]["probe"]["rows"])


def exported_rows(server: Server, kind: str) -> float:
    """What Prometheus gets for a kind of readout."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in server.get("/metrics").body.splitlines()
        if line.startswith("vllm:readout_rows_total") and f'kind="{kind}"' in line
    )


def test_the_client_gets_rows_and_readouts_with_each_token(server: Server) -> None:
    capture = {"inline": {"hooks": {"post_block": [1]}, "positions": "all"}}
    norm = {"kind": "norm", "hooks": {"post_block": [1]}}
    fields: dict[str, Any] = body(capture=capture, readouts=SPEC | {"one": norm})
    prompt = fields.pop("prompt")
    fields.pop("model")
    with Client(server.url) as client:
        reply = client.complete(prompt, **fields)
        *parts, last = client.stream(prompt, **fields | {"max_tokens": 48})
    found, rows = reply.readouts, reply.rows[1, "post_block"]
    assert found["lens"]["token_ids"].shape == (1, 1, 2)
    assert found["sae"]["activations"].shape == (5, 4)
    assert np.isnan(found["norm"]["cosine"]).all()
    assert np.allclose(rows.values[:4].mean(axis=0), found["mean"]["rows"], atol=1e-5)
    lengths = np.linalg.norm(rows.values[4:], axis=1)
    assert np.allclose(found["one"]["norm"][:, 0], lengths, rtol=1e-5)
    whole = last.readouts["p"]["values"]
    assert np.allclose(whole[:5], found["p"]["values"], rtol=1e-5)
    bringing = [part.readouts["p"] for part in parts if part.readouts.get("p")]
    values = np.concatenate([one["values"] for one in bringing])
    # On a busy machine one chunk may have the results of several tokens.
    assert len(bringing) > 1 and np.array_equal(values, whole[: len(values)])
    told = last.readouts["p"]
    assert told.num_prompt_tokens == len(prompt)
    pairs = list(paired([*parts, last], "p"))
    assert "".join(text for text, _ in pairs) == "".join(
        part.text for part in (*parts, last)
    )
    own = [one for one, at in zip(told["values"], told.positions) if at >= len(prompt)]
    values = np.concatenate([one for _, one in pairs if one is not None])
    # The last token, which may share its chunk with others, is not fed to the model.
    assert np.array_equal(values, own) and len(values) == 47
    # Rows are in the first chunk that is sent after they have arrived.
    brought = [part.rows[1, "post_block"] for part in parts if part.rows]
    positions = [position for one in brought for position in one.positions]
    assert positions and positions == list(range(len(positions)))
    everything = last.rows[1, "post_block"].values
    assert len(everything) == 4 + 47
    came = np.concatenate([one.values for one in brought])
    assert np.array_equal(came, everything[: len(came)])
    assert "probe at" in reply._repr_html_()


def test_a_data_set_has_a_servers_readouts(server: Server, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    prompts = [[20 + i, 30, *range(40, 41 + i)] for i in range(7)]
    source.write_text("\n".join(json.dumps({"prompt": one}) for one in prompts))
    specs = {
        "p": PROBE,
        "lens": {"kind": "lens", "top_k": 2},
        "sae": {"kind": "sae", "sae": "jump", "top_k": 4},
        "norm": {"kind": "norm"},
        "mean": SPEC["mean"],
    }
    runner = ServersRunner([remote.Server(server.url, None, None, concurrency=4)])
    assert runner.model.name == "tiny" and runner.model.dtype == "float32"
    plan = Plan.of(
        Survey.of(SourceSpec(path=source)),
        RowsSpec(layers=(0, 1), positions="all", max_tokens=3, readouts=specs),
        OutputSpec(folder=tmp_path / "out", shard_bytes=16_000),
        runner,
    )
    collect(plan, runner, Progress(1, disable=True))
    data = load_dataset(tmp_path / "out")
    view = data.layer(1)
    norms = np.linalg.norm(view.to_numpy(), axis=1)
    assert len(data.shards) > 1
    assert np.allclose(view.readout("norm.norm"), norms, rtol=1e-5)
    assert np.isnan(data.layer(0).readout("norm.cosine")).all()
    assert view.readout("lens.token_ids").shape == (len(norms), 2)
    assert view.readout("sae.features").dtype == np.int32
    sample = data.columns.column("sample").to_numpy()
    ids = data.columns.column("token_id").to_numpy()
    asked = body(prompt=prompts[3], max_tokens=3, return_token_ids=True)
    asked["readouts"] = {"p": plan.rows.readouts["p"]}
    reply = server.post("/v1/completions", asked).body
    written = reply["choices"][0]["token_ids"]
    assert ids[sample == 3].tolist() == prompts[3] + written[:-1]
    wanted = reply["readouts"]["p"]["values"]
    assert np.allclose(view.readout("p.values")[sample == 3], wanted, atol=1e-4)
    assert data.facts["readouts"]["modules"]["direction"]["kind"] == "probe"
    bad = replace(plan.rows, readouts={"l": {"kind": "lens", "top_k": 999}})
    with pytest.raises(CaptureValidationError, match="refused.*0 to 64"):
        Plan.of(plan.survey, bad, plan.output, runner)
    runner.close()


def test_hooks_run_over_http_by_their_names(server: Server) -> None:
    client = VLLMLensClient(server.url, api_key="secret")
    scale = Hook({"name": "scale", "params": {"by": 3.0}}, [0, 1])
    plain = client.generate([20, 30, 40, 50], max_tokens=4, ignore_eos=True)
    found = client.generate(
        [20, 30, 40, 50], max_tokens=4, ignore_eos=True, hooks=[scale]
    )
    assert plain.hook_results is None and found.text != plain.text
    first, second = found.hook_results["0"]["rows"][:2]
    assert first.shape == second.shape == (4, 64) and second.norm() > first.norm()
    with pytest.raises(RuntimeError, match="it is meant to"):
        client.generate("a", hooks=[Hook("fails", [0])])
    with pytest.raises(RuntimeError, match="runs no code of clients"):
        client.generate("a", hooks=[Hook(lambda ctx, h: h, [0])])
    streamed = server.stream(
        "/v1/completions",
        body(vllm_xargs={"apply_hooks": json.dumps([scale.model_dump()])}),
    )
    told = [chunk["hook_results"] for chunk in streamed if "hook_results" in chunk]
    assert [sorted(one) for one in told] == [["0"]]


def test_hooks_for_all_need_the_key_and_are_cleared(server: Server) -> None:
    client = VLLMLensClient(server.url, api_key="secret")
    with pytest.raises(RuntimeError, match="Unauthorized"):
        VLLMLensClient(server.url).clear_hooks()
    names = ["lm_head.weight"]
    assert client.register_hooks([Hook("scale", [2])], prefetch_params=names) == 1
    try:
        answer = client.generate("a", max_tokens=2)
        results = client.collect_hook_results()
        (saved,) = [one for name, one in results.items() if answer.raw["id"] in name]
        assert saved["0"]["rows"][0].shape[1] == 64
    finally:
        client.clear_hooks()
        client.clear_hook_results()
        client.clear_prefetched()
    assert client.prefetch_params(names) == names
    client.generate("a", max_tokens=2)
    assert client.collect_hook_results() == {}
    with pytest.raises(RuntimeError, match="no such field"):
        client._post("hooks/register", {"hooks": [], "wait": True})


def test_the_page_writes_and_reads_out(server: Server) -> None:
    with opened() as tab:
        tab.goto(server.url + "/lens/#tint=probe:direction&max=8")
        tab.fill("textarea", "Anna <b>went</b>")
        tab.click("button:has-text('Generate')")
        tab.wait_for_selector("text=/first token after/")
        assert "<b>went</b>" in tab.inner_text(".tokens")
        assert tab.locator(".token[style]").count() > 8
        tab.click(".token >> nth=2")
        tab.click("button:has-text('Lens of this token')")
        tab.wait_for_selector(".lens tbody tr >> nth=2")
        assert tab.errors == []
