# SPDX-License-Identifier: Apache-2.0
"""interp-engine's interface on an engine, compared with Transformers."""

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import httpx
import pytest
import torch
from fastapi import FastAPI

from tests.interop.streams import streams_of
from vllm.entrypoints.serve.interp_engine.api_router import attach_router
from vllm.entrypoints.serve.routers import attach_routers
from vllm.interop.interp_engine import wire
from vllm.interop.interp_engine.facts import ModelFacts
from vllm.interop.interp_engine.model import ServedModel
from vllm.interop.interp_engine.steering import readable_tap, steering_of, vectors_of
from vllm.interop.interp_engine.types import (
    Address,
    DirectionSet,
    LensSpec,
    RecommendedSampling,
    tap_of,
)
from vllm.interop.interp_engine.wire import decode_tensor, encoded_pieces

PROMPT = [5, 70, 300, 41, 9, 18]
V = torch.linspace(-1, 1, 64)
W = torch.linspace(2, -1, 64) ** 2


def encode_tensor(tensor: torch.Tensor, dtype: str = "float32") -> Any:
    return json.loads(b"".join(encoded_pieces(tensor, dtype)))


class Served:
    """A model, its routes, and the event loop that both run in."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = self.wait(self._load(folder))
        app = FastAPI()
        app.state.engine_client = self.model.engine
        attach_router(app)
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://here")

    async def _load(self, folder: Path) -> ServedModel:
        return ServedModel.load(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            gpu_memory_utilization=0.2,
        )

    def wait(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def all(self, steps: Any) -> list[Any]:
        async def listed() -> list[Any]:
            return [step async for step in steps]

        return self.wait(listed())

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.wait(self.client.post(f"/v1/{route}", json=body, timeout=120))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    opened = Served(model)
    yield opened
    opened.wait(opened.model.shutdown())


def streams(reference, tokens: list[int], change=None) -> list[torch.Tensor]:
    """The output of each layer `[tokens, 64]`, changed by `change(layer, stream)`."""
    return [one[0] for one in streams_of(reference, tokens, change)[1]]


def logits_of(reference, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference.lm_head(reference.model.norm(rows))


STEERING = [
    {
        "point": "resid_post",
        "layers": {
            "0": [
                {"method": "norm_scaled_add", "vector": V.tolist(), "strength": 0.3},
                {"method": "orthogonal", "vector": W.tolist(), "coeff": 0.25},
                {"method": "projection_cap", "vector": V.tolist(), "max": 1.0},
            ]
        },
    },
    {
        "point": "resid_post",
        "layers": {
            "1": [
                {"method": "additive", "vector": W.tolist(), "scale": 2.0},
                {"method": "swap", "vector": V.tolist(), "target": W.tolist()},
            ]
        },
    },
]


def steer(layer: int, h: torch.Tensor) -> torch.Tensor:
    """Apply `STEERING` by the formulas of interp-engine's documentation."""
    v, w = V / V.norm(), W / W.norm()
    if layer == 0:
        share = min(0.3 * float(V.norm()), 1.0)
        h = h + share * h.norm(dim=-1, keepdim=True) * v
        h = h - (h @ w)[..., None] * w * 0.75
        along = h @ v
        return h + (along.clamp(max=1.0) - along)[..., None] * v
    if layer == 1:
        h = h + 2 * W
        return h + (h @ v)[..., None] * (w - v)
    return h


@pytest.mark.e2e
def test_rows_are_the_models_steered_and_not(served, reference) -> None:
    plain = streams(reference, PROMPT)
    addresses = ["resid_pre.1", "blocks.2.hook_resid_post", Address("resid_post", 0)]
    found = served.wait(served.model.capture(PROMPT, addresses, rows=[4, 1]))
    for address, expected in zip(found, (plain[0], plain[2], plain[0])):
        torch.testing.assert_close(found[address], expected[[4, 1]], rtol=0, atol=1e-4)
    changed = streams(reference, PROMPT, steer)
    points = ["resid_post.0", "resid_post.1", "resid_post.2"]
    answer = served.post(
        "capture", prompt_token_ids=PROMPT, points=points, steering=STEERING
    ).json()["activations"]
    for point, expected in zip(points, changed):
        rows = decode_tensor(answer[point])
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.e2e
def test_directions_are_read_where_the_rows_are(served, reference) -> None:
    rows = streams(reference, PROMPT)[1]
    matrix, bias = torch.stack([V, W, -W]), torch.tensor([0.5, 0.0, 1.0])
    sets = [
        DirectionSet("resid_post.1", matrix, bias, "relu"),
        DirectionSet(Address("resid_pre", 2), matrix[:1]),
    ]
    first, second = served.wait(served.model.project(PROMPT, sets))
    expected = (rows @ matrix.T + bias).relu()
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(second, rows @ V[:, None], rtol=1e-4, atol=1e-3)
    body = {"point": "resid_post.1", "vectors": encode_tensor(matrix[:1])}
    (sent,) = served.post(
        "interp-engine/project", prompt_token_ids=PROMPT, directions=[body]
    ).json()["values"]
    torch.testing.assert_close(
        decode_tensor(sent), rows @ matrix[:1].T, rtol=1e-4, atol=1e-3
    )


@pytest.mark.e2e
def test_lenses_read_the_prompt_and_each_generated_token(served, reference) -> None:
    jacobian = torch.eye(64).flip(0) * 0.7
    held = served.wait(served.model.set_lens_jacobians({1: jacobian}))
    assert held == jacobian.nbytes
    lenses = [LensSpec([0, 2]), LensSpec([1, 2], jacobian=True)]
    steps = served.all(
        served.model.generate_with_lens(PROMPT, lenses, top_n=3, max_tokens=3)
    )
    tokens = [step.token_id for step in steps]
    assert tokens[:6] == PROMPT and len(steps) == 9
    assert [step.position for step in steps] == list(range(9))
    assert [step.is_generated for step in steps] == [False] * 6 + [True] * 3
    found = streams(reference, tokens)
    mapped = found[1] @ jacobian.T
    for number, rows in enumerate(([found[0], found[2]], [mapped, found[2]])):
        for layer, one in enumerate(rows):
            expected = logits_of(reference, one).softmax(-1)
            for step in steps:
                ids = step.top_ids[number][layer].long()
                torch.testing.assert_close(
                    step.top_probs[number][layer],
                    expected[step.position][ids],
                    rtol=1e-3,
                    atol=1e-5,
                )
    greedy = logits_of(reference, found[2]).argmax(-1)
    assert tokens[6:] == greedy[5:8].tolist()
    answer = served.post(
        "lens",
        prompt_token_ids=PROMPT,
        lenses=[{"layers": [2]}],
        top_n=2,
        skip_before=4,
        stream=False,
    ).json()["steps"]
    assert [step["position"] for step in answer] == [4, 5]
    assert answer[1]["lenses"][0]["top_ids"] == [steps[5].top_ids[0][1][:2].tolist()]
    assert served.wait(served.model.set_lens_jacobians(None)) == 0


@pytest.mark.e2e
def test_the_head_is_the_models(served, reference) -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    logits = served.wait(served.model.decode_residuals(rows))
    torch.testing.assert_close(logits, logits_of(reference, rows), rtol=0, atol=1e-4)
    top = served.post("decode_residuals", residuals=rows.tolist(), top_k=2).json()
    assert top["token_ids"] == logits.topk(2, dim=-1).indices.tolist()
    directions = served.wait(served.model.unembed_rows([3, 900]))
    assert torch.equal(directions, reference.lm_head.weight[[3, 900]].detach())
    refused = served.post("unembed_rows", token_ids=[99999])
    assert refused.status_code == 422 and "vocabulary" in refused.json()["detail"]


@pytest.mark.e2e
def test_generation_is_streamed_and_whole(served, reference) -> None:
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False
        )[0, 6:].tolist()
    body = {"prompt_token_ids": PROMPT, "max_tokens": 5, "temperature": 0}
    lines = served.post("generate", n_logprobs=2, **body).text.splitlines()
    start, *steps, done = [json.loads(line) for line in lines]
    assert start["type"] == "start" and start["sampling"]["temperature"] == 0
    assert [step["token_id"] for step in steps] == expected
    assert all(len(step["logprobs"]) == 2 for step in steps)
    assert done == {"type": "done", "finish": "length", "n_tokens": 5}
    steered = served.post("generate", stream=False, steering=STEERING, **body).json()
    tokens = PROMPT + steered["token_ids"]
    last = streams(reference, tokens[:-1], steer)[-1]
    greedy = logits_of(reference, last).argmax(-1)[5:]
    assert steered["token_ids"] == greedy.tolist()
    assert steered["text"] == "".join(step["token_str"] for step in steered["steps"])


@pytest.mark.e2e
def test_the_served_model_is_described(served) -> None:
    told = served.wait(served.client.get("/v1/describe")).json()
    assert told["description"]["n_layers"] == 3
    assert told["description"]["d_model"] == 64
    points = ["resid_post.2", "resid_post.3", "z.1", "mlp_out.0"]
    refusals = served.post("serves", points=points).json()["refusals"]
    assert refusals["resid_post.2"] is None
    assert "0 to 2" in refusals["resid_post.3"]
    assert all(refusals[point] for point in points[2:])
    tokens = served.post("tokenize", text="Anna went").json()
    assert len(tokens["token_ids"]) == len(tokens["str_tokens"])
    refused = served.post("capture", prompt_token_ids=PROMPT, points=["z.1"])
    assert refused.status_code == 422 and "not z" in refused.json()["detail"]
    refused = served.post("lens", prompt_token_ids=PROMPT, lenses=[{"layers": [9]}])
    assert refused.status_code == 422
    assert served.post("serves", points=[], more=1).status_code == 422
    long = {"n" * 5000: 1} | {f"n{number}": 1 for number in range(299)}
    refused = served.post("serves", points=["resid_post.0"], **long)
    assert refused.status_code == 422 and len(refused.content) < 4000
    assert refused.json()["detail"][-1]["msg"] == "The body has 284 more errors"


@pytest.mark.e2e
def test_answers_about_the_server_have_all_that_its_clients_read(served) -> None:
    base = "/v1/interp-engine"  # With it as a base URL: BASE/health, BASE/v1/describe.
    ready = served.wait(served.client.get(f"{base}/health")).json()
    assert ready == {"status": "ready", "model": served.model.hf_model_id}
    told = served.wait(served.client.get(f"{base}/v1/describe")).json()
    assert told["recommended_sampling"] == {
        **dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty")),
        **dict.fromkeys(("do_sample", "source")),
    }
    assert told["load"]["quantization"] == "" and told["manifest"]["digest"]
    assert all(isinstance(limit, int) for limit in told["limits"].values())
    too_many = ["resid_pre.0"] * (told["limits"]["max_capture_points"] + 1)
    for route, body, detail in (
        ("serves", {"points": too_many}, "at most 256 items"),
        ("tokenize", {}, "either text or messages"),
        ("generate", {"prompt_token_ids": PROMPT, "max_tokens": 0}, "greater than"),
        ("capture", {"prompt_token_ids": [], "points": ["resid_pre.0"]}, "at least 1"),
    ):
        refused = served.post(route, **body)
        assert refused.status_code == 422
        (error,) = refused.json()["detail"]
        assert error.keys() == {"type", "loc", "msg"} and detail in error["msg"]
    directions = [{"point": "resid_pre.0", "vectors": [[1.0, 2.0]]}]
    for route, body, detail in (
        ("project", {"directions": directions}, "must be [k, 64], not [1, 2]"),
        ("capture", {"points": ["resid_pre.0"], "rows": []}, "rows is empty"),
    ):
        refused = served.post(route, prompt_token_ids=PROMPT, **body)
        assert refused.status_code == 422 and detail in refused.json()["detail"]
    beyond = {"prompt_token_ids": [10**6], "points": ["resid_pre.0"]}
    refused = served.post("capture", **beyond)
    assert refused.status_code == 422 and "vocabulary" in refused.json()["detail"]
    body = {"prompt_token_ids": PROMPT, "max_tokens": 1, "top_p": 2.0, "stream": False}
    assert served.post("generate", **body).json()["sampling"]["top_p"] is None


def test_what_a_checkpoint_recommends_is_what_it_states() -> None:
    def facts(stated: dict[str, Any], given: str = "auto", **override: Any) -> Any:
        model = MagicMock(
            model="name",
            generation_config=given,
            override_generation_config=override,
            try_get_generation_config=lambda: dict(stated),
        )
        return ModelFacts(MagicMock(model_config=model), MagicMock())

    stated = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "eos_token_id": 2}
    found = facts(stated).recommended_sampling
    assert found == RecommendedSampling(temperature=0.7, source="name")
    assert facts(stated).sampling_settings().temperature == 0.7
    greedy = facts(stated | {"do_sample": False}, "folder")
    assert greedy.recommended_sampling.source == "folder"
    assert greedy.sampling_settings().temperature == 0.0
    assert greedy.sampling_settings(temperature=2.0).temperature == 2.0
    assert facts(stated, "vllm").recommended_sampling == RecommendedSampling()
    assert facts(stated, "vllm", top_k=5).sampling_settings().top_k == 5
    assert facts({}).sampling_settings(top_p=1.0).top_p is None


class Block(SimpleNamespace):
    """What `interp_engine.steer.active_steering` returns within `with steer(...)`."""

    specs = (STEERING[1],)
    position_mask = None
    generated = True


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Block:
    opened = Block()
    steer = SimpleNamespace(
        active_steering=lambda model: opened if model is MODEL else None,
        resolve_masked_positions=lambda mask, **_: list(mask),
    )
    monkeypatch.setitem(sys.modules, "interp_engine", SimpleNamespace(steer=steer))
    monkeypatch.setitem(sys.modules, "interp_engine.steer", steer)
    return opened


MODEL = SimpleNamespace(d_model=64, tokenizer=None)


def test_a_call_within_a_block_is_steered_by_it(block: Block) -> None:
    ((field, vectors),) = steering_of(MODEL, None, PROMPT).items()
    assert field == "steering_vectors" and list(vectors) == ["post_block"]
    own = steering_of(MODEL, STEERING[0], PROMPT, generated=False)
    ((field, vectors),) = own.items()
    assert field == "prefill_steering_vectors"
    assert list(vectors["post_block"]) == [0], "its own steering precedes the block"
    other = SimpleNamespace(d_model=64, tokenizer=None)
    assert steering_of(other, None, PROMPT) == {}
    assert steering_of(MODEL, [], PROMPT) == {}


def test_a_block_may_leave_positions_out(block: Block) -> None:
    block.position_mask = [0, 2]
    tiers = steering_of(MODEL, None, PROMPT)
    for entry in tiers["prefill_steering_vectors"]["post_block"][1]:
        assert entry["positions"] == [1, 3, 4, 5]
    assert "positions" not in tiers["decode_steering_vectors"]["post_block"][1][0]
    block.generated = False
    tiers = steering_of(MODEL, None, PROMPT)
    assert list(tiers) == ["prefill_steering_vectors"]
    block.position_mask = list(range(len(PROMPT)))
    assert steering_of(MODEL, None, PROMPT) == {}


def test_operations_in_another_order_are_refused() -> None:
    def spec(*methods: str) -> list[dict[str, Any]]:
        fields = {"vector": V.tolist(), "scale": 1.0, "strength": 1.0, "max": 1.0}
        keys = {
            "additive": ("vector", "scale"),
            "norm_scaled_add": ("vector", "strength"),
            "projection_cap": ("vector", "max"),
            "ablate": ("vector",),
        }
        listed = [
            {"method": name, **{key: fields[key] for key in keys[name]}}
            for name in methods
        ]
        return [{"layers": {"1": listed}}]

    assert vectors_of(spec("additive", "ablate", "projection_cap"), 64)
    for wrong in (("ablate", "additive"), ("additive", "norm_scaled_add")):
        with pytest.raises(ValueError, match="applied in the order"):
            vectors_of(spec(*wrong), 64)
    with pytest.raises(ValueError, match="has 64 values"):
        vectors_of(spec("ablate"), 32)
    with pytest.raises(ValueError, match="use one of"):
        vectors_of([{"layers": {"1": [{"method": "add"}]}}], 64)
    one = {"method": "norm_scaled_add", "vector": V.tolist(), "strength": 1.0}
    for change, said in (
        ({"strenght": 1.0}, "no field 'strenght'"),
        ({"strength": float("nan")}, "finite number"),
        ({"max_fraction": "1"}, "finite number"),
        ({"normalize": "no"}, "true or false"),
    ):
        with pytest.raises(ValueError, match=said):
            vectors_of([{"layers": {"1": [one | change]}}], 64)
    with pytest.raises(ValueError, match="one stream"):
        vectors_of([{"layers": {}, "stream": 1}], 64)
    assert vectors_of([], 64) is None


def test_addresses_and_reads_behind_steering() -> None:
    assert tap_of("resid_post.10") == (10, "post_block")
    assert tap_of(("resid_mid", 3)) == (3, "post_attn")
    assert tap_of("resid_pre", 2) == (2, "pre_attn")
    with pytest.raises(ValueError, match="not served"):
        tap_of("model.layers.5.mlp")
    steered = {"prefill_steering_vectors": {"post_block": {1: []}}}
    assert readable_tap((0, "post_block"), steered, 3) == (0, "post_block")
    assert readable_tap((1, "post_block"), steered, 3) == (2, "pre_attn")
    with pytest.raises(ValueError, match="read and steered"):
        readable_tap((1, "post_block"), steered, 2)


def test_tensors_travel_in_three_dtypes() -> None:
    values = torch.randn(3, 4)
    for dtype in ("float32", "float16", "bfloat16"):
        back = decode_tensor(encode_tensor(values, dtype))
        assert torch.equal(back, values.to(getattr(torch, dtype)).float())
    sent = {"a": [values, [], {}], "b": {"c": values[:0], "d": "é"}}
    with patch.object(wire, "PIECE_BYTES", 6):
        written = json.loads(b"".join(encoded_pieces(sent, "float16")))
    tensor, empty = (encode_tensor(one, "float16") for one in (values, values[:0]))
    assert written == {"a": [tensor, [], {}], "b": {"c": empty, "d": "é"}}
    plain = {"dtype": "float32", "shape": [1], "data": "AAAAAA=="}
    assert decode_tensor(plain) == 0
    for change in (
        *({"dtype": "int8"}, {"dtype": []}, {"shape": [2]}, {"shape": []}),
        *({"shape": [1 << 40, 0], "data": ""}, {"shape": [1] * 9}, {"scale": 1}),
    ):
        bad = plain | change
        with pytest.raises(ValueError):
            decode_tensor(bad)


def test_without_the_option_nothing_is_mounted() -> None:
    app = FastAPI()
    args = Namespace(interp_engine_api=False, enable_lens_page=False)
    attach_routers(app, args)
    assert not any("interp-engine" in getattr(one, "path", "") for one in app.routes)
