# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.steering import _foreign
from vllm.steering.convert import (
    Reading,
    for_model,
    read_vectors,
    reworked,
    write_vectors,
)
from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.provenance import Provenance

DEMO = Path(__file__).parents[2] / "examples" / "demo_model" / "weights"
SAID = Provenance(model="m", model_type="llama", num_layers=99, origin="by hand")
floats = st.floats(-(2.0**100), 2.0**100, width=32)
sets = st.dictionaries(
    st.tuples(st.integers(1, 98), st.just("post_block")),
    arrays.arrays(np.float32, 5, elements=floats),
    min_size=1,
    max_size=5,
).map(lambda vectors: vector_set(vectors, SAID))


def same(one: VectorSet, other: VectorSet) -> bool:
    return one.vectors.keys() == other.vectors.keys() and all(
        np.array_equal(one.vectors[tap], other.vectors[tap]) for tap in one.vectors
    )


@given(
    vectors=sets,
    path=st.lists(
        st.sampled_from([".safetensors", ".json", ".gguf", ".pt", ".npz"]),
        min_size=1,
        max_size=4,
    ),
)
def test_any_chain_of_forms_keeps_the_vectors(
    tmp_path_factory: Any, vectors: VectorSet, path: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    found = vectors
    for number, suffix in enumerate(path):
        file = folder / f"{number}{suffix}"
        write_vectors(file, found)
        found = read_vectors(file)
    assert same(found, vectors)
    if set(path) <= {".safetensors", ".json"}:
        said = found.provenance
        assert (said.model, said.origin, said.hidden_size) == ("m", "by hand", 5)


@pytest.mark.parametrize("suffix", [".safetensors", ".json", ".pt", ".npz"])
def test_vectors_inside_the_block_have_widths_of_their_own(
    tmp_path: Path, suffix: str
) -> None:
    made = Provenance(model="m", hidden_size=4)
    wide = {(1, "mlp_act"): np.ones(6), (2, "mlp_act"): np.arange(6.0)}
    inside = vector_set({**wide, (1, "k"): [2.0, 3.0]}, made)
    assert inside.provenance.hidden_size == 4 and inside.width is None
    both = vector_set({**inside.vectors, (1, "post_block"): np.ones(4)}, made)
    for vectors in (inside, both):
        write_vectors(tmp_path / f"in{suffix}", vectors)
        found = read_vectors(tmp_path / f"in{suffix}")
        assert same(found, vectors)
    doubled = read_vectors(tmp_path / f"in{suffix}?hook=k&scale=2")
    assert doubled.vectors[1, "k"].tolist() == [4.0, 6.0]
    with pytest.raises(SteeringValidationError, match="4 numbers"):
        vector_set({(1, "post_block"): np.ones(4), (2, "post_block"): np.ones(5)})


def one(layer: int = 2) -> VectorSet:
    return vector_set({(layer, "post_block"): [3.0, 4.0]}, SAID)


def test_vectors_are_scaled_after_they_were_brought_to_length_1() -> None:
    assert reworked(one(), scale=2).vectors[2, "post_block"].tolist() == [6.0, 8.0]
    unit = reworked(one(), scale=10, unit=True)
    assert unit.norm((2, "post_block")) == pytest.approx(10)
    with pytest.raises(SteeringValidationError, match="no vector at layer 3"):
        reworked(one(), layers=[3])
    zero = vector_set({(0, "pre_attn"): [0.0, 0.0]})
    with pytest.raises(SteeringValidationError, match="no unit vector"):
        reworked(zero, unit=True)


def test_a_copy_may_say_that_it_belongs_to_another_model() -> None:
    vectors = vector_set({(2, "post_block"): np.ones(192)}, SAID)
    said = for_model(vectors, str(DEMO)).provenance
    assert said.model == str(DEMO) and said.num_layers == 6 and len(said.weights) == 64
    assert said.origin == "by hand"
    with pytest.raises(SteeringValidationError, match="vectors of 2 numbers"):
        for_model(one(), str(DEMO))
    deep = vector_set({(6, "post_block"): np.ones(192)})
    with pytest.raises(SteeringValidationError, match="layers 0 to 5"):
        for_model(deep, str(DEMO))
    with pytest.raises(SteeringValidationError, match="is not a model"):
        for_model(vectors, "/no/such/folder")


def test_an_sae_needs_a_feature_and_keeps_its_place(tmp_path: Path) -> None:
    decoder = np.eye(3, dtype=np.float32)
    name = "blocks.1.hook_resid_pre"
    folder = _foreign.saelens(tmp_path / "sae", decoder, hook_name=name)
    with pytest.raises(SteeringValidationError, match="--feature"):
        read_vectors(folder)
    for path in (folder, folder / "cfg.json"):
        for place in ({}, {"layer": 1}, {"hook": "pre_attn"}):
            found = read_vectors(path, Reading(feature=0, **place))
            assert list(found.vectors) == [(1, "pre_attn")]
    with pytest.raises(SteeringValidationError, match="move no vector"):
        read_vectors(folder, Reading(feature=0, layer=4, hook="post_attn"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"decode_vectors": {"post_block": {"1": [1.0]}}}, "only `vectors`"),
        ({"vectors": 7}, "must be an object"),
        (
            {"vectors": {"post_block": {"1": {"vector": [1.0], "op": "replace"}}}},
            "more",
        ),
        ({"vectors": {"post_block": {"1": None}}}, "list of numbers"),
        ({"vectors": {"post_block": {"1": [1.0], "2": [1.0, 2.0]}}}, "1 numbers"),
    ],
)
def test_files_that_say_more_or_less_than_vectors_are_refused(
    tmp_path: Path, body: Any, said: str
) -> None:
    path = tmp_path / "v.json"
    path.write_text(json.dumps(body))
    with pytest.raises(SteeringValidationError, match=said):
        read_vectors(path)


def test_facts_after_a_files_name_may_hold_an_address() -> None:
    assert Reading.parse("hook=resid_post.3") == Reading(hook="post_block", layer=3)
    assert Reading.parse("layer=3&hook=resid_post").hook == "post_block"
    for wrong in ("hook=nowhere", "layer=2&hook=resid_post.3"):
        with pytest.raises(SteeringValidationError, match="post_block"):
            Reading.parse(wrong)


def test_unknown_forms_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SteeringValidationError, match="no known form"):
        (tmp_path / "v.txt").touch()
        read_vectors(tmp_path / "v.txt")
    with pytest.raises(SteeringValidationError, match="cannot be written.*'.npz'"):
        write_vectors(tmp_path / "v.svec", one())
    with pytest.raises(SteeringValidationError, match="no folder"):
        write_vectors(tmp_path / "a" / "v.pt", one())


def test_json_says_the_norms_of_what_it_holds(tmp_path: Path) -> None:
    ours, scaled = tmp_path / "ours.safetensors", tmp_path / "half.json"
    vector_set({(2, "post_block"): [3.0, 4.0]}, SAID).save(ours)
    write_vectors(scaled, reworked(read_vectors(ours), scale=0.5))
    # Loading refuses norms that differ from those of the vectors.
    found = read_vectors(scaled)
    assert found.norm((2, "post_block")) == 2.5
    assert found.provenance.norms == {"post_block.2": 2.5}
