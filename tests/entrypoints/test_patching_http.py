# SPDX-License-Identifier: Apache-2.0
"""Sweeps over HTTP: answers, streams, refusals, and clients that go."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from clearbox_client import ClearboxError, Client

from tests.support.server import Server
from tests.support.waiting import until
from vllm.entrypoints.serve.patch.client import (
    PatchStudy,
    Span,
    SweepResult,
    pack_vectors,
)
from vllm.interop.reference_fork.patches import inline_rows
from vllm.patching import ablation_sweep, causal_trace, patch_sweep
from vllm.patching.result import Found

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLEAN = [20, 30, 40, 50, 60]
CORRUPT = [20, 30, 41, 50, 60]
ANSWER, FOIL = 70, 80
NARROW = pack_vectors(np.ones(3))
ROUTE = "/v1/patch_sweep"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "prompt": CORRUPT,
    "clean_prompt": CLEAN,
    "answer_token_id": ANSWER,
    "foil_token_id": FOIL,
    "metric": "logit_diff",
}
FIELDS = {name: one for name, one in ASKED.items() if name not in ("model", "prompt")}
"""The same, for a client."""


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as opened:
        yield opened


def kept(server: Server) -> set[str]:
    found: dict[str, Any] = server.get("/v1/capture").body["kept"]["patch_source"]
    return set(found["names"])


def difference(server: Server, prompt: list[int], **fields: Any) -> float:
    """Measured by a completion, without any sweep."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"logprobs": 2, "logprob_token_ids": [ANSWER, FOIL]}
    body["return_tokens_as_token_ids"] = True
    reply = server.post("/v1/completions", {**body, **fields})
    assert reply.status == 200, reply
    (found,) = reply.body["choices"][0]["logprobs"]["top_logprobs"]
    return float(found[f"token_id:{ANSWER}"] - found[f"token_id:{FOIL}"])


def test_a_grid_is_what_single_patched_requests_are(server: Server) -> None:
    hooks = ["pre_attn", "post_block"]
    body = {**ASKED, "hooks": hooks, "source_run": "clean", "keep_source": True}
    body["resume"] = False
    reply = server.post(ROUTE, body)
    assert reply.status == 200, reply
    found = reply.body
    assert found["layers"] == [0, 1, 2] and found["positions"] == [0, 1, 2, 3, 4]
    assert found["auto_captured"] and found["captured_source_run"] == "clean"
    assert [one["hook"] for one in found["hook_grids"]] == hooks
    assert found["grid"] == found["hook_grids"][0]["grid"] and not found["skipped"]
    assert found["noise_floor"] < 1e-5
    assert found["alignment"]["n_clean"] == 5
    assert found["clean"] == pytest.approx(difference(server, CLEAN), abs=1e-5)
    assert found["corrupt"] == pytest.approx(difference(server, CORRUPT), abs=1e-5)
    assert kept(server) == {"clean"}
    for one in found["hook_grids"]:
        for layer in range(3):
            for position in range(5):
                patch = {
                    "layer": layer,
                    "hook": one["hook"],
                    "dest_position": position,
                    "source_run": "clean",
                    "source_position": position,
                }
                expected = difference(server, CORRUPT, patch=[patch])
                value = one["grid"][layer][position]
                assert value == pytest.approx(expected, abs=1e-5)
    largest = np.max(found["grid"])
    assert found["argmax"]["value"] == pytest.approx(largest)
    again = server.post(ROUTE, {**body, "clean_prompt": None})
    assert again.status == 200 and not again.body["auto_captured"]
    assert np.allclose(again.body["grid"], found["grid"], atol=1e-5)
    assert server.delete("/v1/patch_source/clean").body == {"dropped": True}
    assert not kept(server)
    consumers = server.get("/v1/capture").body["consumers"]
    assert "patch_source" in [one["name"] for one in consumers]


def test_heads_and_points_inside_the_block_are_swept(
    server: Server, client: Client
) -> None:
    run = {"source_run": "inside", "keep_source": True}
    entry = {"op": "replace", "positions": [2]}
    entry["from"] = {"run": "inside", "positions": [2]}
    shapes = []
    for hooks, more in ((["q", "z"], {"heads": "all"}), (["attn_out", "mlp_act"], {})):
        chosen = {**FIELDS, **more, "hooks": hooks, "positions": [2]}
        if hooks == ["q", "z"]:  # All points of both sweeps are kept in one run.
            kept_hooks = dict.fromkeys([*hooks, "attn_out", "mlp_act"], "all")
            spec = {"patch_source": {"run": "inside", "hooks": kept_hooks}}
            difference(server, CLEAN, capture=spec, capture_wait=True)
        found = client.patch_sweep(CORRUPT, **{**chosen, **run})
        single = patch_sweep(
            client,
            CLEAN,
            CORRUPT,
            hooks=hooks,
            heads=more.get("heads"),
            positions=[2],
            answer=ANSWER,
            foil=FOIL,
            progress=False,
        )
        for hook, values in found["values"].items():
            assert np.allclose(single.values[hook], values, atol=1e-5)
            assert np.ptp(values) > 1e-4
            shapes.append(values.shape)
            for layer, *at in np.ndindex(values.shape):
                of_head = {"heads": [at[0]]} if more else {}
                patch = {hook: {str(layer): {**entry, **of_head}}}
                expected = difference(server, CORRUPT, steering_vectors=patch)
                assert values[layer, *at] == pytest.approx(expected, abs=1e-5)
    heads = shapes[0][1]
    assert heads > 1 and shapes == [(3, heads, 1)] * 2 + [(3, 1)] * 2
    assert client.drop_run("inside")


def test_cells_whose_run_was_dropped_are_null_with_the_reason(
    server: Server, client: Client
) -> None:
    prompt = [(7 * n) % 1000 + 3 for n in range(60)]
    fields = {**FIELDS, "clean_prompt": [5, *prompt[1:]]}
    whole = client.patch_sweep(prompt, **fields)["values"]["post_block"]
    failed, dropped = [], False
    for event in client.patch_events(prompt, **fields, source_run="gone"):
        if event["type"] == "cell" and not dropped:
            dropped = client.drop_run("gone")
            assert dropped
        if "error" in event:
            assert event["value"] is None and "no run is kept" in event["error"]
            failed.append((event["layer"], event["position"]))
    assert failed and len(event["skipped"]) == len(failed)
    grid = np.array(event["grid"], np.float32)
    known = ~np.isnan(grid)
    assert known.any() and {tuple(at) for at in np.argwhere(~known)} == set(failed)
    assert np.allclose(grid[known], whole[known], atol=1e-5)


def test_a_sweeps_run_is_neither_evicted_nor_replaced(
    server: Server, client: Client
) -> None:
    prompt = [(7 * n) % 1000 + 3 for n in range(200)]
    fields = {**FIELDS, "clean_prompt": [5, *prompt[1:]]}
    fields["hooks"] = ["post_block", "pre_attn", "post_attn"]
    whole = client.patch_sweep(prompt, **fields)["values"]["post_block"]
    every = {"hooks": {"post_block": "all", "mlp_act": "all"}}
    other = [(9 * n) % 1000 + 3 for n in range(250)]
    reply, filled = None, 0
    for event in client.patch_events(prompt, **fields, source_run="used"):
        if event["type"] != "cell" or reply is not None:
            continue
        for filled in range(8):  # More than all runs may take.
            spec = {"patch_source": {"run": f"run{filled}", **every}}
            difference(server, other, capture=spec, capture_wait=True)
        spec = {"patch_source": {"run": "used", **every}}
        body = {"model": "tiny", "prompt": other, "max_tokens": 1, "capture": spec}
        reply = server.post("/v1/completions", body)
    assert reply is not None and reply.status == 400
    assert "using the run 'used'" in reply.body["error"]["message"]
    assert "run0" not in kept(server) and f"run{filled}" in kept(server)
    assert np.allclose(np.array(event["grid"]), whole, atol=1e-5)
    for name in kept(server):
        client.drop_run(name)


def test_a_client_that_goes_before_its_answer_ends_the_cells(server: Server) -> None:
    prompt = [(7 * n) % 1000 + 3 for n in range(200)]
    hooks = ["pre_attn", "post_attn", "post_block", "q", "z", "attn_out", "mlp_act"]
    body = {**ASKED, "prompt": prompt, "clean_prompt": [5, *prompt[1:]]}
    before = finished(server)
    gone = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    document = json.dumps({**body, "hooks": hooks})
    gone.request("POST", ROUTE, document, {"Content-Type": "application/json"})
    until(lambda: kept(server))
    gone.close()
    until(lambda: not kept(server))
    assert 0 < finished(server) - before < len(hooks) * 3 * len(prompt) / 2
    assert server.post(ROUTE, ASKED).status == 200


def finished(server: Server) -> float:
    """How many requests have ended by themselves."""
    text = server.get("/metrics").body
    lines = (one for one in text.splitlines() if "request_success_total{" in one)
    return sum(float(one.split()[-1]) for one in lines if "abort" not in one)


def test_a_stream_has_every_cell_and_the_whole_at_its_end(server: Server) -> None:
    start, *cells, summary = server.stream(ROUTE, ASKED)
    assert (start["type"], summary["type"]) == ("start", "summary")
    assert start["captured_source_run"] == summary["captured_source_run"]
    assert {one["type"] for one in cells} == {"cell"} and len(cells) == 15
    for cell in cells:
        assert summary["grid"][cell["layer"]][cell["position"]] == cell["value"]
    assert not kept(server)


def test_both_clients_get_the_same_as_the_route(server: Server, client: Client) -> None:
    seen: list[Found] = []
    result = patch_sweep(
        client,
        CLEAN,
        CORRUPT,
        answer=ANSWER,
        foil=FOIL,
        on_cell=seen.append,
        progress=False,
    )
    reply = server.post(ROUTE, ASKED).body
    assert np.allclose(result.values["post_block"], reply["grid"], atol=1e-5)
    assert result.clean == pytest.approx(reply["clean"], abs=1e-5)
    assert len(seen) == 15 and result.positions[4] == (4,)
    plain = client.patch_sweep(CORRUPT, **FIELDS)
    assert np.allclose(plain["values"]["post_block"], reply["grid"], atol=1e-5)
    asked: dict[str, Any] = {"answer": ANSWER, "progress": False}
    row = np.ones(64, dtype=np.float32)
    for source in ("zeros", "mean", "noise", row):
        found = ablation_sweep(
            client, CLEAN, source=source, metric="logprob", mask=row, **asked
        )
        assert np.isfinite(found.values["post_block"]).all()
        assert np.isnan(found.corrupt)
    trace = causal_trace(client, CLEAN, [2], **asked)
    assert trace.corrupt != trace.clean


def test_an_interrupted_client_ends_the_cells(server: Server, client: Client) -> None:
    def interrupt(_: Found) -> None:
        raise KeyboardInterrupt

    prompt = [(7 * n) % 1000 + 3 for n in range(60)]
    part = patch_sweep(
        client,
        prompt,
        [5, *prompt[1:]],
        answer=ANSWER,
        foil=FOIL,
        hooks=["pre_attn", "post_attn", "post_block"],
        on_cell=interrupt,
        progress=False,
    )
    values = np.stack(list(part.values.values()))
    assert np.isnan(values).any() and np.isfinite(values).any()
    until(lambda: not kept(server))  # Dropped once the sweep has ended.
    done = server.post(ROUTE, ASKED)  # The slots are free again.
    assert done.status == 200


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"prompt": None}, "prompt"),
        ({"model": "other"}, "model"),
        ({"hook": "post_block", "hooks": ["pre_attn"]}, "hook"),
        ({"layers": {"start": 2, "stop": 1}}, "layers"),
        ({"layers": {"start": 0, "end": 1}}, "layers"),
        ({"positions": [{"span": "no such text"}]}, "positions[0]"),
        ({"hooks": ["z"], "heads": [64]}, "heads"),
        ({"foil_token_id": None, "foil_token": "two words"}, "foil"),
        (
            {"clean_prompt": None, "source_inline": 0, "patch_vectors": NARROW},
            "a vector of this model has",
        ),
        ({"source_run": "a/b"}, "capture.patch_source.run"),
        ({"source_run": "a", "source_module": "zeros"}, "source_module"),
        ({"source_inline": 0, "clean_prompt": None}, "source_inline"),
        ({"source": "ones"}, "source"),
        ({"mask": [1.0]}, "mask"),
        ({"alpha": "x"}, "alpha"),
        ({"metric": "probe:none"}, "probe"),
        ({"answer": [ANSWER]}, "answer_token_id"),
        ({"answer_token_id": None, "answer_token": "two words"}, "answer"),
        ({"seed": -1}, "seed"),
        ({"logprobs": "x"}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"resume": 1}, "resume"),
        ({"clean_baseline": "x"}, "clean_baseline"),
        ({"n_cells": 3}, "n_cells"),
    ],
    ids=lambda one: str(one)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_swept_is_a_400_before_the_first_cell(
    server: Server, change: dict[str, Any], parameter: str, stream: bool
) -> None:
    reply = server.post(ROUTE, {**ASKED, "stream": stream, **change})
    assert reply.status == 400, reply
    assert parameter in reply.body["error"]["message"]
    assert not kept(server)


def test_the_earlier_forks_client_sweeps(server: Server) -> None:
    async def study() -> None:
        found = PatchStudy(model="tiny", base_url=f"{server.url}/v1", logprobs=5)
        text = "the big dog was happy"
        clean = await found.capture_clean(text, run="one")
        assert clean.num_prompt_tokens > 4
        assert await found.positions_for(text, "dog was")
        answered = await found.capture_clean(CLEAN, run="two", answer_token=" the")
        assert answered.clean_logprob is not None and answered.clean_logprob < 0
        seen: list[Any] = []
        asked: dict[str, Any] = {"answer_token": " the", "on_cell": seen.append}
        result = await found.sweep_layers_positions(
            "the big dog was sad", clean=clean, layers=[0, 2], positions=[-1], **asked
        )
        assert isinstance(result, SweepResult) and len(seen) == 2
        assert result.to_numpy().shape == (2, 1) and len(result.top(1)) == 1
        hooks = ["pre_attn", "post_block"]
        with pytest.raises(ClearboxError, match="no rows at pre_attn"):
            await found.sweep_layers_positions(CORRUPT, run="two", hooks=hooks, **asked)
        both = await found.sweep_layers_positions(
            CORRUPT, clean_prompt=CLEAN, hooks=hooks, **asked
        )
        near = await found.zoom(
            both["post_block"], corrupt_prompt=CORRUPT, run="two", answer_token=" the"
        )
        assert near.hook == "post_block"
        spans = [Span("dog was")]
        zeros = await found.ablation_sweep(
            text, layers="all", positions=spans, answer_token=" the"
        )
        assert np.isfinite(zeros.grid).all() and zeros.corrupt is None
        one = await found.ablation_sweep(
            text,
            positions=[1],
            source_inline=0,
            patch_vectors=pack_vectors(np.ones(64), "bfloat16"),
            mask={"indices": [0, 3]},
            answer_token=" the",
        )
        assert np.isfinite(one.grid).all()
        assert await found.drop_run("one") and not await found.drop_run("one")
        assert await found.drop_run("two")

    asyncio.run(study())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_packed_rows_are_what_was_packed(dtype: str) -> None:
    rows = np.array([[1.0, -2.5, 0.125], [0.0, 3.0, 1e-2]])
    found = inline_rows(pack_vectors(rows, dtype))
    assert found is not None
    assert np.allclose(found, rows, rtol=2**-8 if dtype == "bfloat16" else 1e-3)
