# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.steering.vectors import load_vectors
from vllm.v1.residual import model_identity
from vllm.v1.residual.model_identity import (
    ModelIdentity,
    digest_of_weights,
    identity_of_path,
)
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import FORMAT, read_module, save_module
from vllm.v1.steering.spec.provenance import LAYER_CONVENTION, Provenance, Source

DEMO = Path(__file__).parents[4] / "examples" / "demo_model" / "weights"
VECTOR = torch.arange(4.0)


def check(path: Path, model: ModelIdentity) -> None:
    """As a server does with a file."""
    read_module(path).provenance.check_model(model, Source(str(path)))


def identity(name: str = "org/calm", weights: str = "", **shape: Any) -> ModelIdentity:
    facts = {"hidden_size": 4, "num_hidden_layers": 6, **shape}
    config = SimpleNamespace(
        architectures=[facts.pop("architecture", "LlamaForCausalLM")],
        model_type="llama",
        get_text_config=lambda: SimpleNamespace(**facts),
    )
    return ModelIdentity(name, config, ["served"], lambda: weights)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "calm.safetensors"
    said = Provenance.of_model(identity(weights="abc"), "mean of 3 pairs")
    save_module(path, {"post_block": {3: VECTOR}}, provenance=said)
    return path


def test_everything_that_is_known_is_stored(made: Path) -> None:
    said = read_module(made).provenance
    assert said == Provenance(
        model="org/calm",
        architecture="LlamaForCausalLM",
        model_type="llama",
        weights="abc",
        hidden_size=4,
        num_layers=6,
        origin="mean of 3 pairs",
        norms={"post_block.3": pytest.approx(VECTOR.norm().item())},
    )
    assert said.metadata()["layer_convention"] == LAYER_CONVENTION


@pytest.mark.parametrize(
    "model",
    [
        identity(weights="abc"),
        identity("/other/folder", weights="abc"),
        identity(weights=""),
        identity("/models/calm", weights=""),
    ],
)
def test_the_same_model_is_recognised(made: Path, model: ModelIdentity) -> None:
    check(made, model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (identity(weights="def"), "vllm steer convert .* --for-model org/calm"),
        (identity("org/other"), "made with the model 'org/calm'"),
        (identity(hidden_size=8), "vectors of 4 numbers.* has 8; extract"),
        (identity(num_hidden_layers=7), "a model of 6 layers.* has 7; extract"),
        (identity(architecture="GPT2LMHeadModel"), "LlamaForCausalLM.*GPT2LMHead"),
    ],
)
def test_vectors_of_another_model_are_refused(
    made: Path, model: ModelIdentity, said: str
) -> None:
    with pytest.raises(SteeringValidationError, match=said):
        check(made, model)


def test_without_provenance_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    path.write_text(json.dumps({"vectors": {"post_block": {"3": [1.0]}}}))
    check(path, identity())


def test_json_says_the_same_under_metadata(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    body = {"vectors": {"post_block": {"3": [1.0]}}, "metadata": {"num_layers": 9}}
    path.write_text(json.dumps(body))
    with pytest.raises(SteeringValidationError, match="a model of 9 layers"):
        check(path, identity())


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"layer_convention": "1-based"}, "counts layers as '1-based'"),
        ({"num_layers": "many"}, "num_layers in the metadata"),
        ({"num_layers": "0"}, "num_layers in the metadata"),
        ({"norms": "[1]"}, "norms in the metadata"),
        ({"norms": '{"post_block.3": "x"}'}, "norms in the metadata"),
        ({"norms": '{"post_block.3": 9.0}'}, "has the norm 9, but it is 3.7"),
        ({"norms": '{"post_block.4": 9.0}'}, "but it is missing"),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    tmp_path: Path, metadata: dict[str, str], said: str
) -> None:
    path = tmp_path / "calm.safetensors"
    tensors = {"post_block.3": VECTOR}
    save_file(tensors, path, metadata={"format": FORMAT, **metadata})
    with pytest.raises(SteeringValidationError, match=said):
        read_module(path)


def _saved(folder: Path, *files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
    return digest_of_weights(str(folder))


def test_the_digest_is_of_every_tensor_and_not_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a small part of a tensor is read."""
    monkeypatch.setattr(model_identity, "_SAMPLED_BYTES", 1 << 16)
    weights = {f"layers.{i}.w": torch.randn(64, 1024) for i in range(12)}
    names = sorted(weights)
    whole = _saved(tmp_path / "whole", weights)
    parts = [{n: weights[n] for n in names[start::5]} for start in range(5)]
    assert _saved(tmp_path / "parts", *parts) == whole
    for name in names:
        changed = {**weights, name: weights[name] * 2}
        assert _saved(tmp_path / name, changed) != whole
    other = {n: t for n, t in weights.items() if n != names[0]} | {
        "x": weights[names[0]]
    }
    assert _saved(tmp_path / "renamed", other) != whole


def test_a_broken_file_has_a_digest_all_the_same(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"\xff" * 9, b"\2\0\0\0\0\0\0\0[]", b"{}"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        assert len(digest_of_weights(str(folder))) == 64


def test_weights_decide_before_names() -> None:
    demo = identity_of_path(str(DEMO))
    said = Provenance(model="another", weights=demo.weights)
    said.check_model(demo, Source("file"))
    with pytest.raises(SteeringValidationError, match="other weights"):
        Provenance(weights="0" * 64).check_model(demo, Source("file"))


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "not/a/name", "x" * 200])
def test_a_model_that_is_not_here_has_no_digest(name: str) -> None:
    assert digest_of_weights(name) == ""


def test_a_folder_says_what_model_it_is() -> None:
    demo = identity_of_path(str(DEMO))
    assert (demo.architecture, demo.model_type) == ("LlamaForCausalLM", "llama")
    assert (demo.hidden_size, demo.num_layers) == (192, 6)
    assert demo.weights == digest_of_weights(str(DEMO))
    assert demo.is_named("weights") and not demo.is_named("other")


def test_json_says_norms_of_vectors_as_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    one, other = {"vector": [3.0, 4.0], "scale": 9}, {"vector": [0.0, 1.0]}
    body: dict[str, Any] = {"vectors": {"post_block": {"3": one, "4": [one, other]}}}
    norms = {"post_block.3": 5.0, "post_block.4[0]": 5.0, "post_block.4[1]": 1.0}
    path.write_text(json.dumps(body | {"metadata": {"norms": norms}}))
    assert load_vectors(path).provenance.norms == norms
    for name in norms:
        said = {"norms": norms | {name: 5.5}}
        path.write_text(json.dumps(body | {"metadata": said}))
        with pytest.raises(SteeringValidationError, match=re.escape(repr(name))):
            load_vectors(path)
