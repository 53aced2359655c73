# SPDX-License-Identifier: Apache-2.0
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.steering import _foreign
from vllm.steering.convert import write_gguf
from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files.gguf import read_gguf
from vllm.v1.steering.spec.provenance import Provenance

WIDTH = 8
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def row(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)


def same(found: VectorSet, expected: dict[Any, np.ndarray]) -> bool:
    return found.vectors.keys() == expected.keys() and all(
        np.array_equal(found.vectors[tap], expected[tap]) for tap in expected
    )


def test_repengs_direction_is_of_and_for_the_output_of_its_block(
    tmp_path: Path,
) -> None:
    directions = {1: row(1), 5: row(5)}
    path = _foreign.repeng(tmp_path / "v.gguf", directions)
    expected = {(layer, "post_block"): v for layer, v in directions.items()}
    for layers in ("applied", "measured"):
        assert same(read_gguf(path, layers), expected)
    said = read_gguf(path).provenance
    assert said.model_type == "llama" and "form of repeng" in said.origin


def test_llama_cpps_direction_is_applied_one_block_after_it_was_measured(
    tmp_path: Path,
) -> None:
    measured = [row(0), row(1), row(2)]
    path = _foreign.cvector_generator(tmp_path / "v.gguf", measured)
    applied = {(i + 1, "post_block"): v for i, v in enumerate(measured)}
    assert same(read_gguf(path), applied)
    where = {(i, "post_block"): v for i, v in enumerate(measured)}
    assert same(read_gguf(path, "measured"), where)
    assert "form of llama.cpp" in read_gguf(path).provenance.origin


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_float_types_are_read(tmp_path: Path, dtype: str) -> None:
    vector = row(1).astype(dtype)
    path = _foreign.repeng(tmp_path / "v.gguf", {1: vector})
    assert same(read_gguf(path), {(1, "post_block"): vector.astype(np.float32)})


@given(
    layers=st.dictionaries(
        st.integers(1, 90),
        arrays.arrays(np.float32, WIDTH, elements=FLOATS),
        min_size=1,
        max_size=6,
    ),
    writer=st.sampled_from(["repeng", "llama.cpp"]),
)
def test_written_then_read_is_the_same(
    tmp_path_factory: Any, layers: dict[int, np.ndarray], writer: Any
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "v.gguf"
    expected = {(layer, "post_block"): v for layer, v in layers.items()}
    said = Provenance(model_type="qwen3")
    write_gguf(path, vector_set(expected, said), writer)
    assert same(read_gguf(path), expected)
    file = GGUFReader(path)
    assert file.fields["general.architecture"].contents() == "controlvector"
    assert file.fields["controlvector.model_hint"].contents() == "qwen3"
    count, kinds = file.fields["controlvector.layer_count"], GGUFValueType
    assert count.types == [kinds.INT32 if writer == "llama.cpp" else kinds.UINT32]
    assert count.contents() == len(layers)
    tensors = {one.name: one.data for one in file.tensors}
    assert tensors.keys() == {f"direction.{layer}" for layer in layers}
    for layer, vector in layers.items():
        assert np.array_equal(tensors[f"direction.{layer}"], vector)


def test_the_stream_entering_a_block_is_the_output_of_the_one_before(
    tmp_path: Path,
) -> None:
    vectors = {(3, "pre_attn"): row(1), (2, "post_block"): row(2)}
    write_gguf(tmp_path / "v.gguf", vector_set(vectors))
    found = read_gguf(tmp_path / "v.gguf")
    assert same(found, {(2, "post_block"): row(1) + row(2)})


@pytest.mark.parametrize(
    ("tap", "writer", "said"),
    [
        ((0, "post_block"), "llama.cpp", "refuses direction.0"),
        ((0, "pre_attn"), "repeng", "pre_attn of layer 0 is another place"),
        ((2, "post_attn"), "repeng", "post_attn of layer 2 is another place"),
    ],
)
def test_what_a_control_vector_cannot_say_is_refused(
    tmp_path: Path, tap: Any, writer: Any, said: str
) -> None:
    with pytest.raises(SteeringValidationError, match=said):
        write_gguf(tmp_path / "v.gguf", vector_set({tap: row(1)}), writer)
    assert not (tmp_path / "v.gguf").exists()


def test_files_that_are_no_control_vectors_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, said: str, layers: Any = "applied") -> None:
        with pytest.raises(SteeringValidationError, match=said):
            read_gguf(path, layers)

    refused(tmp_path / "missing.gguf", "no file")
    whole = _foreign.repeng(tmp_path / "whole.gguf", {1: row(1)}).read_bytes()
    for size in range(0, len(whole), 7):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(whole[:size])
        refused(broken, "not a GGUF file|quantised|is not a|8 numbers|no vectors|kind")
    counts = struct.pack("<4sIQQQcIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 4, 1 << 50)
    broken.write_bytes(counts)  # An array of so many numbers, none of which follows.
    refused(broken, "not a GGUF file")
    model = _foreign.gguf(tmp_path / "m.gguf", {"x": row(1)}, architecture="llama")
    refused(model, "of the kind 'llama'")
    none = _foreign.gguf(tmp_path / "n.gguf", {"other": row(1)})
    refused(none, "no vectors")
    named = _foreign.gguf(tmp_path / "o.gguf", {"direction.x": row(1)})
    refused(named, "not named direction.LAYER")
    first = {"direction.0": row(1)}
    signed = GGUFValueType.INT32
    zero = _foreign.gguf(tmp_path / "z.gguf", first, layer_count_type=signed)
    refused(zero, "at least 1", "measured")
    mixed = {1: row(1), 2: np.ones(3, np.float32)}
    refused(_foreign.repeng(tmp_path / "w.gguf", mixed), "8 numbers")
    nan = {1: np.full(WIDTH, np.nan, np.float32)}
    refused(_foreign.repeng(tmp_path / "nan.gguf", nan), "finite")
