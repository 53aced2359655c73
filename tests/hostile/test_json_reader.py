# SPDX-License-Identifier: Apache-2.0
"""Reading in pieces gives the same result; excess is refused before it is parsed."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.serve.utils import json_reader, json_structure
from vllm.entrypoints.serve.utils.json_reader import read_json
from vllm.entrypoints.serve.utils.json_structure import BodyError, BodyLimits

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", '\\"', "[", "]}", ",,", "é" * 9, "😀" * 7, "\\u0041", "a" * 40]
)
numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(
    allow_nan=False, allow_infinity=False
)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(text, inner, max_size=5)
    ),
    max_leaves=60,
)


def in_small_pieces(raw: bytes) -> Any:
    """Use pieces as for a body a thousand times larger."""
    with (
        patch.object(json_reader, "INLINE_BYTES", 0),
        patch.object(json_reader, "SHORT", 2),
        patch.object(json_reader, "SHORT_TEXT", 6),
        patch.object(json_reader, "_PIECE", 3),
        patch.object(json_reader, "_PIECE_BYTES", 40),
        patch.object(json_structure, "_SLAB", 7),
    ):
        return read_json(raw)


def has_long_name(value: Any) -> bool:
    if isinstance(value, dict):
        names = any(len(json.dumps(key)) > 6 for key in value)
        return names or any(map(has_long_name, value.values()))
    return isinstance(value, list) and any(map(has_long_name, value))


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_pieces_make_the_whole(value: Any, ascii_only: bool, indent: Any) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    if has_long_name(value):
        return
    assert in_small_pieces(raw) == value == read_json(raw)


@given(value=values, at=st.integers(0, 400), junk=st.binary(max_size=3))
def test_what_is_not_json_is_not_read_either_way(
    value: Any, at: int, junk: bytes
) -> None:
    raw = json.dumps(value).encode()
    at %= len(raw) + 1
    raw = raw[:at] + junk + raw[at + 1 :]

    def outcome(read: Any) -> Any:
        try:
            return json.dumps(read(raw))
        except (ValueError, RecursionError):
            return "refused"

    whole, pieces = outcome(read_json), outcome(in_small_pieces)
    assert pieces in (whole, "refused")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_every_encoding_of_json_is_read(encoding: str) -> None:
    value = {"é": ["😀" * 20] * 9}
    raw = json.dumps(value, ensure_ascii=False).encode(encoding)
    assert read_json(raw) == value == in_small_pieces(raw)


SMALL = BodyLimits(
    num_bytes=4000,
    depth=8,
    containers=50,
    strings=60,
    values=100,
    loose_values=80,
    loose_bytes=900,
)
TOO_MUCH: dict[str, tuple[bytes, str]] = {
    "bytes": (b" " * 5000, "4000 bytes"),
    "depth": (b"[" * 9 + b"]" * 9, "nested lists"),
    "containers": (b"[" + b"{}," * 50 + b"{}]", "lists and objects"),
    "texts": (b"[" + b'"",' * 61 + b'""]', "texts and names"),
    "values": (b"[" + b"1," * 101 + b"1]", "values"),
    "digits": (b"[" + b"1" * 65 + b"]", "64 digits"),
    "bits": (b"[18446744073709551616]", "64 bits"),
    "negative bits": (b"[-9223372036854775809]", "64 bits"),
    "surrogates": (rb'{"a": "\ud800"}', "lone surrogate"),
    "raw surrogates": (b'"\xed\xa0\x80"', "lone surrogate"),
    "loose bytes": (b" " * 901, "bytes outside"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_too_much_of_anything_is_refused(what: str) -> None:
    raw, said = TOO_MUCH[what]
    with (
        patch.object(json_reader, "INLINE_BYTES", 0),
        pytest.raises(BodyError) as found,
    ):
        read_json(raw, SMALL)
    assert said in str(found.value)
    assert len(str(found.value)) < 400


def test_depth_is_looked_at_in_small_bodies_too() -> None:
    for raw in (b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900):
        with pytest.raises(BodyError, match="nested lists"):
            read_json(raw)
    assert read_json(b'["' + b"[" * 900 + b'"]') == ["[" * 900]


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert read_json(rb'"\ud83d\ude00"') == "😀"
    assert in_small_pieces(rb'"\ud83d\ude00' * 1 + rb"\ud83d\ude00" * 9 + b'"')
