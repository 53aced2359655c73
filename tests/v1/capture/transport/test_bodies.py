# SPDX-License-Identifier: Apache-2.0
import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from clearbox_client.rows import RowSet
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.http import as_json as results_as_json
from vllm.v1.capture.results import RowsByTap, request_key
from vllm.v1.capture.transport import bodies
from vllm.v1.capture.transport.bodies import (
    PIECE_BYTES,
    SMALL,
    Body,
    as_json,
    as_safetensors,
    coalesced,
    form_for,
)
from vllm.v1.capture.transport.parts import Part, Reference, described
from vllm.v1.capture.types import CaptureResult
from vllm.v1.readouts.frontend import http
from vllm.v1.readouts.frontend.http import Listed
from vllm.v1.readouts.results import ReadoutResult

WIDTH = 5


def part(number: int, rows: int = 3, **more: Any) -> Part:
    dtype = more.get("dtype", torch.float32)
    return Part(
        f"inline/{number}_post_block",
        number,
        "post_block",
        torch.randn(rows, more.get("width", WIDTH)).to(dtype),
        list(range(rows)),
        [None if position == 1 else 7 * position for position in range(rows)],
        "http",
        more.get("heads", ()),
    )


def tell(parts: list[Part]) -> Any:
    def told(reference: Reference) -> Mapping[str, Any]:
        payload = [described(one, reference) for one in parts]
        return {"text": 'ä "quoted" rows-', "capture_results": {"inline": payload}}

    return told


def shown(rows: RowsByTap) -> Any:
    result = CaptureResult(request_key("r"), "ok", payload=rows)
    return results_as_json({"inline": result})["inline"]["payload"]


def sent(body: Body) -> bytes:
    data = b"".join(bytes(piece) for piece in body.pieces)
    assert body.size in (None, len(data)), "Content-Length is wrong"
    return data


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_json_holds_each_part_as_base64(rows: list[int], dtype: torch.dtype) -> None:
    parts = [part(i, n, dtype=dtype) for i, n in enumerate(rows)]
    reply = json.loads(sent(as_json(tell(parts), parts)))
    assert reply["text"] == 'ä "quoted" rows-'
    for one, told in zip(parts, reply["capture_results"]["inline"], strict=True):
        assert base64.b64decode(told["data"]) == bytes(one.data)


def test_rows_of_some_heads_name_them_in_every_form() -> None:
    told = described(part(0, heads=[3, 1]), lambda one: {})
    assert told["heads"] == [3, 1]
    assert "heads" not in described(part(0), lambda one: {})
    rows = RowsByTap()
    facts = {"positions": [4], "token_ids": [7], "heads": [3, 1]}
    rows.put((0, "z"), torch.zeros(1, WIDTH), facts)
    rows = RowsByTap.united([rows])
    (entry,) = shown(rows)
    assert entry["heads"] == [3, 1]
    found = RowSet.of([entry])[0, "z"]
    assert found.heads == (3, 1) and "heads [3, 1]" in repr(found)
    rows.put((0, "z"), torch.zeros(1, WIDTH), {**facts, "heads": []})
    (entry,) = shown(rows)
    assert "heads" not in entry and RowSet.of([entry])[0, "z"].heads == ()


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=3),
    st.integers(0, 2),
    st.integers(1, 7),
)
def test_large_arrays_are_inserted_as_lists(
    shapes: list[tuple[int, int]], rows: int, each: int
) -> None:
    parts = [part(i) for i in range(rows)]
    arrays = [np.random.default_rng(0).standard_normal(s, np.float32) for s in shapes]
    for array in arrays:
        array.flat[0] = np.nan
    results = [ReadoutResult("custom", arrays={"ü": array}) for array in arrays]
    listed = [Listed(results={'"a"': {"one": one}}) for one in results]

    def with_arrays(reference: Reference) -> Mapping[str, Any]:
        found = [reference(one) for one in listed]
        return {"readouts": found, **tell(parts)(reference)}

    with patch.object(http, "PIECE_NUMBERS", each):
        for form in (as_json, as_safetensors):
            data = sent(form(with_arrays, parts))
            reply = json.loads(data) if form is as_json else response_in(data)
            expected = [np.where(np.isnan(a), None, a).tolist() for a in arrays]
            assert [one['"a"']["one"]["ü"] for one in reply["readouts"]] == expected
            assert reply["readouts"] == [one.plain() for one in listed]
            assert reply["text"] == 'ä "quoted" rows-'
            assert len(reply["capture_results"]["inline"]) == rows


def response_in(file: bytes) -> Any:
    """The document in a safetensors file."""
    size = int.from_bytes(file[:8], "little")
    return json.loads(json.loads(file[8 : 8 + size])["__metadata__"]["response"])


def test_large_parts_are_made_piece_by_piece() -> None:
    parts = [part(0, 2, width=PIECE_BYTES // 4)]
    body = as_json(tell(parts), parts)
    pieces = [bytes(piece) for piece in body.pieces]
    assert max(map(len, pieces)) <= PIECE_BYTES * 4 // 3
    reply = json.loads(b"".join(pieces))
    data = base64.b64decode(reply["capture_results"]["inline"][0]["data"])
    assert data == bytes(parts[0].data)


@given(st.lists(st.integers(0, 6)))
def test_small_pieces_are_joined(sizes: list[int]) -> None:
    with patch.object(bodies, "SMALL", 4):
        given_pieces = [bytes([size]) * size for size in sizes]
        joined = list(coalesced(given_pieces))
    assert b"".join(joined) == b"".join(given_pieces) and all(joined)
    for one, other in pairwise(joined):
        assert max(len(one), len(other)) >= 4


def test_safetensors_is_read_by_its_own_library() -> None:
    parts = [part(0), part(1, 0), part(2, 2, dtype=torch.bfloat16)]
    data = sent(as_safetensors(tell(parts), parts))
    tensors = safetensors.torch.load(data)
    assert tensors.keys() == {one.name for one in parts}
    for one in parts:
        assert torch.equal(tensors[one.name], one.rows)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document = json.loads(header["__metadata__"]["response"])
    told = document["capture_results"]["inline"]
    assert [entry["part"] for entry in told] == [one.name for one in parts]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("multipart/mixed, application/json", "application/json"),
        ("text/html, multipart/mixed", "application/json"),
        ("text/html, Application/Safetensors; q=0.9", "application/safetensors"),
        ("image/png", "application/json"),
    ],
)
def test_the_first_form_that_there_is_is_chosen(accept: str, chosen: str) -> None:
    assert form_for(accept) == chosen


@pytest.mark.parametrize(
    "accept",
    [
        "multipart/mixed",
        "Application/vnd.apache.arrow.stream; q=1",
        "multipart/mixed, application/vnd.apache.arrow.stream",
    ],
)
def test_other_forms_for_tensors_are_refused_with_those_there_are(accept: str) -> None:
    with pytest.raises(CaptureValidationError, match="use application/safetensors"):
        form_for(accept)


def test_safetensors_hold_large_rows_without_a_copy() -> None:
    parts = [part(number, 3, width=SMALL) for number in range(2)]
    body = as_safetensors(tell(parts), parts)
    assert body.is_ready and body.size is not None
    pieces = list(body.pieces)
    assert sum(map(len, pieces)) == body.size and len(pieces) <= 5
    places = {np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces}
    assert {one.rows.data_ptr() for one in parts} <= places


def test_many_small_arrays_wait_as_one_large_array_does() -> None:
    def outputs(choices: int) -> Any:
        array = np.ones((62, 3, 64), np.float32)
        result = ReadoutResult("lens", list(range(62)), arrays={"logprobs": array})
        sample = SimpleNamespace(readouts={"lens": result})
        return [SimpleNamespace(outputs=[sample] * choices)]

    assert isinstance(http.response_readouts(outputs(1)), dict)
    assert isinstance(http.response_readouts(outputs(2)), Listed)
    assert http.response_readouts([SimpleNamespace(outputs=[])]) is None
