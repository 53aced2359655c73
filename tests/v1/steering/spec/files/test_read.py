# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.steering import _foreign
from vllm.steering.convert import write_vectors
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import (
    FORMAT,
    Reading,
    read_module,
    read_vectors,
    save_module,
    vector_set,
)
from vllm.v1.steering.spec.files.read import FORMS
from vllm.v1.steering.spec.provenance import Provenance

VECTOR = torch.arange(4.0)


def test_written_then_read_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "calm.safetensors"
    save_module(
        path,
        {"post_block": {3: VECTOR}},
        decode_vectors={"pre_attn": {0: VECTOR * 2}},
        metadata={"model": "demo"},
    )
    found = read_module(path).vectors
    assert torch.equal(found["vectors"]["post_block"]["3"], VECTOR)
    assert torch.equal(found["decode_vectors"]["pre_attn"]["0"], VECTOR * 2)
    assert found.keys() == {"vectors", "decode_vectors"}


def test_json_is_the_form_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    body = {"vectors": {"post_block": {"3": [1.0]}}}
    path.write_text(json.dumps({**body, "metadata": {"model": "demo"}}))
    assert read_module(path).vectors == body


def test_files_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    def refused(name: str, said: str) -> None:
        with pytest.raises(SteeringValidationError, match=said):
            read_module(tmp_path / name)

    refused("missing.json", "no file")
    (tmp_path / "a.txt").write_text("{}")
    refused("a.txt", "no known form")
    (tmp_path / "a.json").write_text("{")
    refused("a.json", "not JSON")
    (tmp_path / "b.json").write_text("[]")
    refused("b.json", "object")
    convention = {"metadata": {"layer_convention": "1-based"}}
    (tmp_path / "c.json").write_text(json.dumps(convention))
    refused("c.json", "1-based")
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    refused("a.safetensors", "not a safetensors file")
    save_file({"my_vector": VECTOR}, tmp_path / "b.safetensors")
    refused("b.safetensors", "'my_vector' .* without its place")
    marks = {"format": FORMAT}
    save_file({"layer3": VECTOR}, tmp_path / "c.safetensors", metadata=marks)
    refused("c.safetensors", "not named")


def test_forms_that_people_have_are_modules(tmp_path: Path) -> None:
    layers = torch.stack([VECTOR, VECTOR * 2])
    torch.save(VECTOR, tmp_path / "one.pt")
    np.save(tmp_path / "one.npy", VECTOR.numpy())
    np.save(tmp_path / "row.npy", VECTOR.numpy()[None])
    torch.save(layers, tmp_path / "all.pt")
    np.save(tmp_path / "all.npy", layers.numpy())
    several = {"a.b": VECTOR * 3, "c": layers}
    save_file(several, tmp_path / "several.safetensors")
    np.savez(tmp_path / "several.npz", **{k: v.numpy() for k, v in several.items()})
    write_vectors(tmp_path / "one.gguf", vector_set({(3, "post_block"): VECTOR}))
    svec = {"model_type": "llama", "directions": {"3": VECTOR.tolist()}}
    (tmp_path / "one.svec").write_text(json.dumps(svec | {"explained_variances": {}}))
    expected = {
        "one.pt?layer=3": ("post_block", {3: 1}),
        "one.npy?layer=3&hook=pre_attn": ("pre_attn", {3: 1}),
        "row.npy?layer=3&scale=2": ("post_block", {3: 2}),
        "all.pt?numbers=block&hook=post_attn": ("post_attn", {0: 1, 1: 2}),
        "all.npy?numbers=block&layer=1": ("post_block", {1: 2}),
        "several.safetensors?key=a.b&layer=5": ("post_block", {5: 3}),
        "several.safetensors?key=c&numbers=block": ("post_block", {0: 1, 1: 2}),
        "several.npz?key=a.b&layer=5": ("post_block", {5: 3}),
        "one.gguf": ("post_block", {3: 1}),
        "one.svec": ("pre_attn", {3: 1}),
        "one.svec?hook=pre_attn&scale=-2": ("pre_attn", {3: -2}),
    }
    for place, (hook, scales) in expected.items():
        (found,) = read_module(tmp_path / place).vectors.values()
        assert list(found) == [hook], place
        for layer, scale in scales.items():
            entry = found[hook][layer]
            vector = torch.as_tensor(entry["vector"]) * entry["scale"]
            assert torch.equal(vector, VECTOR * scale), place
        assert len(found[hook]) == len(scales), place


def test_a_feature_of_gemma_scope_is_a_module(tmp_path: Path) -> None:
    folder = tmp_path / "gemma-scope-2b-pt-res" / "layer_20" / "width_16k"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    decoder = generator.normal(size=(6, 4)).astype(np.float32)
    np.savez(
        folder / "params.npz",
        W_enc=generator.normal(size=(4, 6)).astype(np.float32),
        W_dec=decoder,
        b_enc=np.zeros(6, np.float32),
        b_dec=np.zeros(4, np.float32),
        threshold=np.zeros(6, np.float32),
    )
    place = f"{folder / 'params.npz'}?feature=2"
    found = read_module(place).vectors["vectors"]["post_block"][20]
    assert np.allclose(found["vector"], decoder[2])
    with pytest.raises(SteeringValidationError, match="0 to 5"):
        read_module(f"{folder}?feature=6")


@pytest.mark.parametrize(
    "said",
    [
        *("layer", "layer=x", "layer=-1", "layer=", "layer=1&layer=1", "key="),
        *("hook=middle", "colour=blue", "numbers=some", "scale=nan", "feature=1_0"),
    ],
)
def test_what_stands_behind_a_file_must_be_known(tmp_path: Path, said: str) -> None:
    torch.save(VECTOR, tmp_path / "one.pt")
    with pytest.raises(SteeringValidationError, match="after the file's name"):
        read_module(f"{tmp_path / 'one.pt'}?{said}")


def test_one_vector_needs_a_layer(tmp_path: Path) -> None:
    torch.save(VECTOR, tmp_path / "one.pt")
    with pytest.raises(SteeringValidationError, match="without its place"):
        read_module(tmp_path / "one.pt")
    (tmp_path / "bad.svec").write_text('{"directions": [1]}')
    with pytest.raises(SteeringValidationError, match="is not an .svec file"):
        read_module(tmp_path / "bad.svec")


VALUES = {
    "hook": "post_block",
    "layer": "3",
    "key": "post_block.3",
    "numbers": "block",
    "gguf_layers": "measured",
    "feature": "1",
    "scale": "2",
}
SAID = Provenance(model="demo", origin="by hand")


def written(folder: Path, form: str) -> Path:
    """A file of a form, with the vectors of layers 2 and 3, or an SAE at layer 3."""
    vectors = {(2, "post_block"): VECTOR, (3, "post_block"): VECTOR * 2}
    if form == "svec":
        directions = {layer: vector.tolist() for (layer, _), vector in vectors.items()}
        (folder / "v.svec").write_text(json.dumps({"directions": directions}))
        return folder / "v.svec"
    if form == "sae":
        name = "blocks.3.hook_resid_post"
        return _foreign.saelens(folder / "sae", np.eye(4, dtype="f4"), hook_name=name)
    suffix = {"dictionary": "npz"}.get(form, form)
    write_vectors(folder / f"v.{suffix}", vector_set(vectors, SAID))
    return folder / f"v.{suffix}"


@pytest.mark.parametrize("fact", VALUES)
@pytest.mark.parametrize("form", FORMS)
def test_a_fact_is_applied_or_refused(tmp_path: Path, form: str, fact: str) -> None:
    """What a fact leaves is what was there, at its place; nothing is ignored."""
    file = written(tmp_path, form)
    hook = "pre_attn" if form == "svec" else "post_block"
    needed = "feature=1&" * (form == "sae" and fact != "feature")
    key = {"gguf": "direction.3"}.get(form, "post_block.3")
    value = {"hook": hook, "key": key}.get(fact, VALUES[fact])
    takes = {*FORMS[form].takes, "scale"} - {"numbers"}  # All keys name their place.
    if fact not in takes:
        with pytest.raises(SteeringValidationError, match=fact):
            read_module(f"{file}?{needed}{fact}={value}")
        return
    found = read_vectors(f"{file}?{needed}{fact}={value}")
    chosen = fact in ("layer", "key") or form == "sae"
    assert found.taps == [(layer, hook) for layer in ([3] if chosen else [2, 3])]
    whole = read_vectors(f"{file}?feature=1" if form == "sae" else file)
    factor = 2 if fact == "scale" else 1
    for tap, vector in found.vectors.items():
        assert np.array_equal(vector, whole.vectors[tap] * factor)
    if form in ("safetensors", "json"):
        module = read_module(f"{file}?{fact}={value}")
        assert (module.provenance.model, module.provenance.origin) == (
            "demo",
            "by hand",
        )
    other = {"layer": "4", "hook": "post_attn", "key": "post_block.4", "feature": "9"}
    if fact in other:
        with pytest.raises(SteeringValidationError, match=f"^{fact}: "):
            read_module(f"{file}?{needed}{fact}={other[fact]}")


def test_facts_after_the_name_and_beside_it_are_joined(tmp_path: Path) -> None:
    file = written(tmp_path, "safetensors")
    found = read_vectors(f"{file}?layer=3", Reading(scale=2))
    assert found.vectors[3, "post_block"].tolist() == (VECTOR * 4).tolist()
    with pytest.raises(SteeringValidationError, match="layer: it is given after"):
        read_vectors(f"{file}?layer=3", Reading(layer=3))


def test_tiers_and_norms_are_kept_where_something_is_selected(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    layers = {2: VECTOR, 3: VECTOR * 2}
    save_module(
        path,
        {"post_block": layers},
        decode_vectors={"pre_attn": {2: VECTOR + 1, 3: VECTOR + 2}},
    )
    found = read_module(f"{path}?layer=3&scale=2")
    assert found.vectors.keys() == {"vectors", "decode_vectors"}
    assert found.provenance.norms.keys() == {"post_block.3", "decode.pre_attn.3"}
    (one,) = read_module(f"{path}?key=decode.pre_attn.2").vectors.items()
    assert one[0] == "decode_vectors" and list(one[1]["pre_attn"]) == ["2"]


def test_operations_of_json_are_not_lost_where_something_is_selected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "v.json"
    entry = {"vector": [1.0, 2.0], "positions": "all_generated"}
    for extra in (entry, {"vector": [1.0, 2.0], "op": "project_out"}):
        vectors = {"post_block": {"2": [1.0, 2.0], "3": extra}}
        path.write_text(json.dumps({"vectors": vectors}))
        with pytest.raises(SteeringValidationError, match="only additions"):
            read_module(f"{path}?layer=2")


def test_an_sae_without_a_place_that_is_ours_is_told_its_place(tmp_path: Path) -> None:
    name = "blocks.3.attn.hook_z"
    sae = _foreign.saelens(tmp_path / "sae", np.eye(4, dtype="f4"), hook_name=name)
    with pytest.raises(SteeringValidationError, match="both --hook and --layer"):
        read_module(f"{sae}?feature=1&layer=3")
    found = read_vectors(f"{sae}?feature=1&hook=post_attn.3")
    assert found.taps == [(3, "post_attn")]
    assert "feature 1 of the SAE" in found.provenance.origin
