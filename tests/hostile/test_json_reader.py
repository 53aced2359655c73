# SPDX-License-Identifier: Apache-2.0
"""Bodies are read as the standard library reads them; excess is refused."""

import json
from time import thread_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.serve.utils.json_reader import (
    PIECE_BYTES,
    BodyError,
    BodyLimits,
    _has_long_exponent,
    read_json,
)
from vllm.v1.residual.plain_data import unique_object

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


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_a_body_is_read_as_it_was_written(
    value: Any, ascii_only: bool, indent: Any
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert read_json(raw) == value


@given(value=values, at=st.integers(0, 400), junk=st.binary(max_size=3))
def test_what_is_read_is_what_the_standard_library_reads(
    value: Any, at: int, junk: bytes
) -> None:
    raw = json.dumps(value).encode()
    at %= len(raw) + 1
    raw = raw[:at] + junk + raw[at + 1 :]
    try:
        found = read_json(raw)
    except BodyError:
        return
    assert found == json.loads(raw, object_pairs_hook=unique_object)


SLOW = (
    *("1e308", "-1e+308", "9.9E307", "1.7976931348623157e308", "5e-324", "1e-0307"),
    *("1" * 330 + "e-30", "0." + "7" * 400, "-" + "9" * 300 + ".5"),
)


@pytest.mark.parametrize("number", SLOW)
def test_numbers_that_msgspec_converts_slowly_are_read_soon(number: str) -> None:
    raw = f"[{', '.join([number] * 9)}]".encode()
    assert read_json(raw) == json.loads(raw)
    most = (900 << 10) // (len(number) + 1)
    raw = f"[{','.join([number] * most)}]".encode()
    begun = thread_time()
    read_json(raw)
    assert thread_time() - begun < 0.25, "msgspec's own conversion takes up to 1.5 s"


@pytest.mark.parametrize("before", range(PIECE_BYTES - 8, PIECE_BYTES + 1))
def test_a_slow_number_between_two_pieces_is_found(before: int) -> None:
    assert _has_long_exponent(b"0" * before + b",1e+308,")
    assert not _has_long_exponent(b"0" * before + b",1e+30,8,")


def test_a_long_wrong_text_is_refused_soon() -> None:
    raw = b'"' + b"\\u00e9" * (6 << 20) + b"'"
    begun = thread_time()
    with pytest.raises(BodyError, match="not JSON"):
        read_json(raw)
    assert thread_time() - begun < 0.25, "a search for half characters takes 0.6 s"


def test_infinity_is_out_of_range_however_it_is_read() -> None:
    for raw in (b"[1e999]", b"[-1e400, 0.5]", b"[" + b"9" * 99_999 + b".0]"):
        with pytest.raises(BodyError, match="out of range"):
            read_json(raw)


@pytest.mark.parametrize("before", [0, 99_999])
def test_half_a_character_is_found_wherever_it_is(before: int) -> None:
    pair = b"\\ud83d\\ude00"
    raw = b'["' + b"x" * before + pair
    for half in (pair[:6], pair[6:]):
        for after in (b'"]', b"e" * 20 + b'"]'):
            with pytest.raises(BodyError, match="lone surrogate"):
                read_json(raw + half + after)
    with pytest.raises(BodyError) as found:
        read_json(raw)
    assert "surrogate" not in str(found.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_every_encoding_of_json_is_read(encoding: str) -> None:
    value = {"é": ["😀" * 20] * 9}
    raw = json.dumps(value, ensure_ascii=False).encode(encoding)
    assert read_json(raw) == value


SMALL = BodyLimits(num_bytes=4000, depth=8, containers=50, strings=60, values=100)
TOO_MUCH: dict[str, tuple[bytes, str]] = {
    "bytes": (b" " * 5000, "4000 bytes"),
    "depth": (b"[" * 9 + b"]" * 9, "nested lists"),
    "containers": (b"[" + b"{}," * 50 + b"{}]", "lists and objects"),
    "texts": (b"[" + b'"",' * 61 + b'""]', "texts and names"),
    "values": (b"[" + b"1," * 101 + b"1]", "values"),
    "bits": (b"[18446744073709551616]", "64 bits"),
    "negative bits": (b"[-9223372036854775809]", "64 bits"),
    "a key twice": (b'{"a": [{"b": 1, "b": 1}]}', "the key 'b' twice"),
    "a key twice, in other words": (rb'{"a": 1, "\u0061": 1}', "the key 'a' twice"),
    "digits": (b"[" + b"1" * 3000 + b"]", "64 bits"),
    "not a number": (b"[NaN]", "not JSON"),
    "surrogates": (rb'{"a": "\ud800"}', "lone surrogate"),
    "raw surrogates": (b'"\xed\xa0\x80"', "not JSON"),
    "nothing": (b"", "not JSON"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_too_much_of_anything_is_refused(what: str) -> None:
    raw, said = TOO_MUCH[what]
    with pytest.raises(BodyError) as found:
        read_json(raw, SMALL)
    assert said in str(found.value)
    assert len(str(found.value)) < 400


@given(value=values)
def test_signs_within_texts_do_not_count(value: Any) -> None:
    raw = json.dumps({"text": '{[,:"\\' * 500, "value": value}).encode()
    assert read_json(raw, BodyLimits(containers=99, values=999)) == json.loads(raw)


@pytest.mark.parametrize("deep", [900, 100_000])
def test_depth_is_looked_at_in_small_bodies_too(deep: int) -> None:
    for raw in (b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep):
        with pytest.raises(BodyError, match="lists and objects"):
            read_json(raw)
    assert read_json(b'["' + b"[" * deep + b'"]') == ["[" * deep]


def test_the_deepest_body_that_is_read() -> None:
    assert read_json(b"[" * 8 + b"1" + b"]" * 8, SMALL)
