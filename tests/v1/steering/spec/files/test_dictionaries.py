# SPDX-License-Identifier: Apache-2.0
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import Reading, VectorSet, read_vectors

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
ONE, TWO = [1.0, -2.0, 0.5], [4.0, 5.0, 6.0]


def read_dictionary(path: Path, numbers: Any = None, **facts: Any) -> VectorSet:
    return read_vectors(path, Reading(numbers=numbers, **facts))


def plain(path: Path, *options: Any, **facts: Any) -> dict[Any, list[float]]:
    found = read_dictionary(path, *options, **facts)
    return {tap: vector.tolist() for tap, vector in found.vectors.items()}


def npy(values: list[float]) -> bytes:
    """A NumPy array file of version 1, byte by byte."""
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({len(values)},), }}"
    padded = head.ljust(118 - 1) + "\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded))
    return start + padded.encode() + struct.pack(f"<{len(values)}d", *values)


def npz(path: Path, entries: dict[str, list[float]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in entries.items():
            archive.writestr(f"{name}.npy", npy(values))
    return path


def test_names_say_where_a_vector_acts(tmp_path: Path) -> None:
    expected = {(3, "post_block"): ONE, (0, "pre_attn"): TWO}
    path = npz(tmp_path / "v.npz", {"post_block.3": ONE, "pre_attn.0": TWO})
    assert plain(path) == expected
    torch.save(
        {"post_block": {3: torch.tensor(ONE)}, "pre_attn": {"0": torch.tensor(TWO)}},
        tmp_path / "v.pt",
    )
    assert plain(tmp_path / "v.pt") == expected


@pytest.mark.parametrize("name", ["{}", "layer_{}", "layers.{}", "direction.{}"])
def test_numbers_mean_what_the_caller_says(tmp_path: Path, name: str) -> None:
    path = npz(tmp_path / "v.npz", {name.format(0): ONE, name.format(4): TWO})
    blocks = {(0, "post_attn"): ONE, (4, "post_attn"): TWO}
    assert plain(path, "block", hook="post_attn") == blocks
    states = {(0, "pre_attn"): ONE, (3, "post_block"): TWO}
    assert plain(path, "hidden_states") == states
    with pytest.raises(SteeringValidationError, match="--numbers"):
        read_dictionary(path)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"vectors": rows}])
def test_the_rows_of_one_tensor_are_numbered(tmp_path: Path, wrap: Any) -> None:
    rows = torch.tensor([ONE, TWO], dtype=torch.bfloat16)
    torch.save(wrap(rows), tmp_path / "v.pt")
    found = plain(tmp_path / "v.pt", "block")
    assert found == {(0, "post_block"): ONE, (1, "post_block"): TWO}


class Attack:
    def __reduce__(self) -> Any:
        return (print, ("code of a file was run",))


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: Any) -> None:
    torch.save({"post_block.1": Attack()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Attack(), protocol=2))
    buffer = io.BytesIO()
    np.savez(buffer, **{"post_block.1": np.array([Attack()], dtype=object)})
    (tmp_path / "c.npz").write_bytes(buffer.getvalue())
    for name in ("a.pt", "b.pt", "c.npz"):
        with pytest.raises(SteeringValidationError, match="cannot be read|not an"):
            read_dictionary(tmp_path / name, "block")
    assert "code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "dictionary of vectors"),
        (torch.zeros(3), "no key of .* is a number"),
        ({"somewhere": torch.ones(3)}, "numbers"),
        ({"x": torch.ones(3), 1: torch.ones(3)}, "neither HOOK.LAYER"),
        ({1: torch.ones(3), "1": torch.ones(3)}, "layer 1 twice"),
        ({1: torch.ones(3), 2: torch.ones(4)}, "3 numbers"),
        ({1: torch.tensor([1.0, float("nan")])}, "finite"),
        ({1: "text"}, "list of numbers"),
    ],
)
def test_what_is_no_dictionary_of_vectors_is_refused(
    tmp_path: Path, content: Any, said: str
) -> None:
    torch.save(content, tmp_path / "v.pt")
    with pytest.raises(SteeringValidationError, match=said):
        read_dictionary(tmp_path / "v.pt", "block")


@pytest.mark.parametrize("name", ["v.pt", "v.npz"])
def test_broken_and_missing_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SteeringValidationError, match="no file"):
        read_dictionary(tmp_path / name)
    for content in (b"", b"nonsense", b"PK\x03\x04 half an archive"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SteeringValidationError, match="cannot be read|not an"):
            read_dictionary(tmp_path / name)


@pytest.mark.parametrize("key", ["post_block.3", "3", "layer_3", 3])
def test_a_key_that_names_a_place_is_no_name_to_be_moved(
    tmp_path: Path, key: Any
) -> None:
    torch.save({key: torch.tensor(ONE), "x": torch.tensor(TWO)}, tmp_path / "two.pt")
    torch.save({key: torch.tensor(ONE)}, tmp_path / "one.pt")
    for name in ("one.pt", "two.pt"):
        path = tmp_path / name
        numbers = None if key == "post_block.3" else "block"
        with pytest.raises(SteeringValidationError, match="no vector at layer 4"):
            read_dictionary(path, numbers, layer=4, key=str(key))
        found = read_dictionary(path, numbers, layer=3, key=str(key))
        assert list(found.vectors) == [(3, "post_block")]
        if numbers:
            with pytest.raises(SteeringValidationError, match="--numbers"):
                read_dictionary(path, layer=4, key=str(key))
        else:
            with pytest.raises(SteeringValidationError, match="no key .* is a number"):
                read_dictionary(path, "block", key=str(key))


def test_states_have_their_own_hook_points(tmp_path: Path) -> None:
    path = npz(tmp_path / "v.npz", {"0": ONE, "4": TWO})
    entering = plain(path, "hidden_states", hook="pre_attn")
    assert entering == {(0, "pre_attn"): ONE}
    with pytest.raises(SteeringValidationError, match="hook: .* post_attn"):
        read_dictionary(path, "hidden_states", hook="post_attn")
