# SPDX-License-Identifier: Apache-2.0
"""interp-engine's protocol, classes and server with an engine of ours."""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("interp_engine", reason="make test-interop")

import torch
from fastapi.testclient import TestClient
from interp_engine import api, sampling
from interp_engine.address import Address
from interp_engine.server.app import create_app
from interp_engine.server.config import ServerConfig
from interp_engine.server.schemas import decode_tensor, encode_tensor
from interp_engine.steer_specs import (
    AblateSpec,
    AddSpec,
    NormScaledAddSpec,
    OrthogonalDecompSpec,
    ProjectionCapSpec,
    SteeringSpec,
    SwapSpec,
)

from vllm.entrypoints.serve.interp_engine.answers import MANIFEST
from vllm.interop.interp_engine import types, wire
from vllm.interop.interp_engine.model import ServedModel
from vllm.interop.interp_engine.steering import vectors_of

pytestmark = pytest.mark.interop

PROMPT = [5, 70, 300, 41, 9, 18]


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[TestClient]:
    """A client of interp-engine's server with our model."""
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64}

    def load() -> ServedModel:
        served = ServedModel.load(str(model), gpu_memory_utilization=0.2, **options)
        assert isinstance(served, api.EngineAPI), "an attribute is missing"
        return served

    app = create_app(ServerConfig(hf_model_id=str(model)), loader=load)
    with TestClient(app) as opened:
        while opened.get("/health").json()["status"] == "loading":
            pass
        told = opened.get("/health").json()
        assert told["status"] == "ready", told
        yield opened


def test_the_class_has_all_methods_of_the_protocol() -> None:
    for name, theirs in vars(api.EngineAPI).items():
        if not name.startswith("_") and inspect.isfunction(theirs):
            wanted = inspect.signature(theirs).parameters
            found = inspect.signature(getattr(ServedModel, name)).parameters
            assert list(wanted) == list(found)[: len(wanted)], name
            for one in wanted.values():
                assert found[one.name].default == one.default, (name, one)
                assert found[one.name].kind == one.kind, (name, one)


@pytest.mark.parametrize(
    "name", ["DirectionSet", "LensSpec", "LensStep", "EngineDescription"]
)
def test_records_have_the_same_fields(name: str) -> None:
    theirs = [one.name for one in dataclasses.fields(getattr(api, name))]
    assert [one.name for one in dataclasses.fields(getattr(types, name))] == theirs


def test_its_steering_specs_are_entries_here() -> None:
    v, w = torch.randn(64), torch.randn(64)
    spec = SteeringSpec.at(
        "resid_post.1",
        AddSpec(v, 2.0),
        OrthogonalDecompSpec(w, 0.5),
        AblateSpec(v),
        SwapSpec(v, w),
        ProjectionCapSpec(v, max=1.0),
    )
    other = SteeringSpec.at("resid_pre.0", NormScaledAddSpec(v, 0.5, normalize=True))
    vectors = vectors_of([spec, other], 64)
    ops = [entry.get("op", "add") for entry in vectors["post_block"][1]]
    assert ops == ["add", "project_out", "project_out", "swap", "clamp"]
    assert vectors["pre_attn"][0][0]["norm_match"] is True


def test_tensors_are_the_same_on_the_wire() -> None:
    values = torch.randn(2, 5)
    for dtype in ("float32", "float16", "bfloat16"):
        theirs = encode_tensor(values, dtype)
        written = b"".join(wire.encoded_pieces(values, dtype))
        assert theirs.model_dump() == json.loads(written)
        assert torch.equal(
            decode_tensor(theirs), wire.decode_tensor(theirs.model_dump())
        )


def test_its_server_captures_projects_and_reads_lenses(client, reference) -> None:
    with torch.no_grad():
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True)
    rows = states.hidden_states[2][0]
    body = {"prompt_token_ids": PROMPT, "points": ["resid_post.1"]}
    answer = client.post("/v1/capture", json=body).json()["activations"]
    found = wire.decode_tensor(answer[str(Address("resid_post", 1))])
    torch.testing.assert_close(found, rows, rtol=0, atol=1e-4)

    v = torch.linspace(-1, 1, 64)
    wanted = {"point": "resid_post.1", "vectors": [v.tolist()]}
    body = {"prompt_token_ids": PROMPT, "directions": [wanted]}
    (values,) = client.post("/v1/project", json=body).json()["values"]
    torch.testing.assert_close(
        wire.decode_tensor(values)[:, 0], rows @ v, rtol=1e-4, atol=1e-3
    )

    lens = {"prompt_token_ids": PROMPT, "lenses": [{"layers": [1]}], "stream": False}
    steps = client.post("/v1/lens", json=lens).json()["steps"]
    best = reference.lm_head(reference.model.norm(rows)).argmax(-1).tolist()
    assert [step["lenses"][0]["top_ids"][0][0] for step in steps] == best

    body = {"prompt_token_ids": PROMPT, "max_tokens": 3, "temperature": 0}
    told = client.post("/v1/generate", json={**body, "stream": False}).json()
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False
    )
    assert told["token_ids"] == expected[0, 6:].tolist()


def test_its_server_describes_and_tokenizes(client, reference) -> None:
    told = client.get("/v1/describe").json()
    assert told["description"]["backend"] == "clearbox"
    assert told["recommended_sampling"]["temperature"] is None
    body = {"text": "Anna went", "prepend_bos": False}
    tokens = client.post("/v1/tokenize", json=body).json()
    assert "".join(tokens["str_tokens"]) == "Anna went"


@pytest.mark.parametrize("generated", [True, False])
def test_generation_within_its_block_is_steered(client, reference, generated) -> None:
    v = torch.linspace(-1, 1, 64)
    ops = [{"method": "additive", "vector": v.tolist(), "scale": 3.0}]
    body = {"prompt_token_ids": PROMPT, "max_tokens": 4, "temperature": 0}
    plain = client.post("/v1/generate", json={**body, "stream": False}).json()
    body["steering"] = [{"point": "resid_post", "layers": {"0": ops}}]
    body |= {"stream": False, "steer_generated": generated}
    told = client.post("/v1/generate", json=body).json()
    fed = [*PROMPT, *told["token_ids"]][:-1]

    def steer(module, inputs, output):
        changed = output.clone()
        changed[:, : None if generated else len(PROMPT)] += 3 * v
        return changed

    with reference.model.layers[0].register_forward_hook(steer), torch.no_grad():
        logits = reference(torch.tensor([fed])).logits[0, len(PROMPT) - 1 :]
    assert told["token_ids"] == logits.argmax(-1).tolist() != plain["token_ids"]


def test_the_digest_is_that_of_its_interface() -> None:
    assert MANIFEST == {"version": api.MANIFEST_VERSION, "digest": api.MANIFEST_DIGEST}


@pytest.mark.parametrize("name", ["RecommendedSampling", "SamplingSettings"])
def test_sampling_has_the_same_fields(name: str) -> None:
    theirs = [one.name for one in dataclasses.fields(getattr(sampling, name))]
    assert [one.name for one in dataclasses.fields(getattr(types, name))] == theirs
