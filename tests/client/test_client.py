# SPDX-License-Identifier: Apache-2.0
"""The client without a server: payloads, vectors, replies, errors, notebooks."""

import base64
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from clearbox_client import (
    Chunk,
    ClearboxError,
    Client,
    InputError,
    Readout,
    RowSet,
    decode,
    pack,
    paired,
    unpack,
)

from tests.client._answering import served
from vllm.v1.capture.frontend.http import in_base64
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.transport.parts import described, parts_of_payload

CLIENT = Path(__file__).parents[2] / "client"


def entry(rows: torch.Tensor, layer: int = 3) -> dict[str, Any]:
    payload = RowsByTap()
    facts = {
        "positions": list(range(4, 4 + len(rows))),
        "token_ids": list(range(10, 10 + len(rows))),
    }
    payload.put((layer, "post_block"), rows, facts)
    (part,) = parts_of_payload("", payload)
    told = json.loads(json.dumps(described(part, in_base64)))
    return dict(told)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_the_servers_bit_for_bit(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, :3] = torch.tensor([float("inf"), -0.0, 1e-40])
    found = decode([entry(rows)])[3, "post_block"]
    assert found.dtype == (np.float16 if dtype == torch.float16 else np.float32)
    assert torch.equal(torch.from_numpy(found.copy()).to(dtype), rows)
    assert found.tobytes() == rows.to(torch.from_numpy(found).dtype).numpy().tobytes()


def test_rows_that_are_cut_off_are_refused() -> None:
    told = entry(torch.ones(3, 4))
    told["data"] = base64.b64encode(b"\0" * 20).decode()
    with pytest.raises(ValueError, match="5 values for the shape"):
        decode([told])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_packed_vectors_are_what_the_server_reads(dtype: str) -> None:
    from vllm.v1.steering.spec.parse import SteeredModel, parse_vectors

    model = SteeredModel({2: ["post_block"], 5: ["post_block"]}, 6, torch.float32)
    rows = np.random.default_rng(0).normal(size=(2, 6))
    packed = pack({"post_block": {5: rows[1], 2: rows[0]}}, dtype, scales={5: -2.0})
    parsed = parse_vectors(json.loads(json.dumps(packed)), model, "v").vectors
    kind = getattr(torch, dtype)
    for layer, row, scale in ((2, rows[0], 1.0), (5, rows[1], -2.0)):
        wanted = torch.from_numpy(row).float() if dtype == "bfloat16" else None
        wanted = (wanted if wanted is not None else torch.from_numpy(row)).to(kind)
        found = torch.as_tensor(np.asarray(parsed[layer, "post_block"]))
        assert torch.allclose(found.double(), wanted.double() * scale, rtol=1e-6)
        ours = unpack(packed["post_block"])[layer]
        assert np.allclose(ours, wanted.double().numpy() * scale, rtol=1e-6)


@pytest.mark.parametrize(
    "vectors", [{5: [1.0, float("nan")]}, {1: [1.0], 2: [1.0, 2.0]}, {1: [[1.0]]}]
)
def test_vectors_that_cannot_be_are_refused(vectors: Any) -> None:
    with pytest.raises(ValueError, match=r"post_block, layer \d") as caught:
        pack({"post_block": vectors})
    error = caught.value
    assert isinstance(error, ClearboxError) and error.status == 0
    assert error.remedy and error.remedy.startswith("all must be finite")
    assert error.parameter and error.parameter.startswith("vectors.post_block.")
    assert error.value


@pytest.mark.parametrize(
    ("vectors", "scales", "told"),
    [
        ({5: np.ones(3)}, None, "5 must map layers to vectors"),
        ({"post_block": {5: np.ones(3)}}, {4: 2.0}, r"scales has \[4\]"),
    ],
)
def test_what_would_be_ignored_is_refused(vectors: Any, scales: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        pack(vectors, scales=scales)


RISK = {"kind": "probe", "positions": [2, 3], "taps": [[1, "post_block"]]} | {
    "values": [[0.5], [None]]
}
MEAN = {"kind": "rows", "positions": [0, 1], "taps": [[1, "post_block"]]} | {
    "rows": {
        "dtype": "float32",
        "shape": [1, 3],
        "data": base64.b64encode(np.arange(3, dtype="<f4").tobytes()).decode(),
    }
}


def reply(**more: Any) -> dict[str, Any]:
    rows = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    choice = {
        "index": 0,
        "text": " b c",
        "finish_reason": "length",
        "stop_reason": None,
    }
    result = {"status": "ok", "error": None, "payload": [entry(rows)]}
    return {
        "choices": [{**choice, "prompt_token_ids": [1, 2], "token_ids": [3, 4]}],
        "capture_results": {"inline": result},
        "readouts": {"risk": RISK, "mean": MEAN},
    } | more


Handler = Callable[[httpx.Request], httpx.Response]


def answering(sent: list[Any], answer: Any) -> Handler:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        sent.append((request.url.path, body))
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"prompt": f"t{body['tokens'][0]}"})
        return answer if isinstance(answer, httpx.Response) else answer(request)

    return handle


def test_a_reply_has_rows_with_positions_ids_and_tokens() -> None:
    sent: list[Any] = []
    document = reply()
    document["capture_results"]["inline"]["payload"][0]["positions"] = [0, 1, 2]
    handler = answering(sent, httpx.Response(200, json=document))
    with served(handler) as url, Client(url) as client:
        capture = {"inline": {"hooks": {"post_block": [3]}}}
        found = client.complete("a", capture=capture, tokens=True, seed=None)
    path, body = sent[0]
    assert path == "/v1/completions" and body["prompt"] == "a" and "seed" not in body
    assert body["capture_wait"] is True and body["return_token_ids"] is True
    assert found.text == " b c" and found.finish_reason == "length"
    rows = found.rows[3, "post_block"]
    assert rows.tokens == ["t1", "t2", "t3"] and rows.token_ids == [10, 11, 12]
    assert rows.at(1).tolist() == [4.0, 5.0, 6.0, 7.0] and rows.dtype == "bfloat16"
    assert found.captures["inline"].status == "ok"
    risk, mean = found.readouts["risk"], found.readouts["mean"]
    assert (risk.kind, risk.positions, len(risk)) == ("probe", [2, 3], 2)
    assert risk["values"][0] == 0.5 and np.isnan(risk["values"][1])
    assert mean.taps == [(1, "post_block")] and mean["rows"].tolist() == [[0, 1, 2]]
    shown = found._repr_html_()
    assert "<svg" in shown and "<iframe" in shown and "risk" in shown
    with pytest.raises(KeyError, match="position 9"):
        rows.at(9)
    with pytest.raises(KeyError, match=r"\(4, 'x'\) is not in .*layer 3, post_block"):
        found.rows[4, "x"]


def test_messages_go_to_the_chat_route_and_several_choices_have_rows_each() -> None:
    rows = [entry(torch.full((1, 4), float(index))) for index in range(2)]
    document = reply()
    document["choices"] = [
        {"index": i, "message": {"content": f"c{i}"}, "finish_reason": "stop"}
        for i in range(2)
    ]
    document["capture_results"]["inline"]["payload"] = {"0": [rows[0]], "1": [rows[1]]}
    document["readouts"] = {"0": {"risk": RISK}, "1": {"mean": MEAN}}
    sent: list[Any] = []
    handler = answering(sent, httpx.Response(200, json=document))
    with served(handler) as url, Client(url) as client:
        found = client.chat([{"role": "user", "content": "Hi"}], n=2)
    assert sent[0][0] == "/v1/chat/completions" and "messages" in sent[0][1]
    assert found.texts == ["c0", "c1"]
    assert [list(one) for one in found.readouts_of] == [["risk"], ["mean"]]
    assert [one[3, "post_block"].values[0, 0] for one in found.rows_of] == [0.0, 1.0]


def test_a_text_is_neither_a_chat_nor_a_list_of_prompts() -> None:
    with Client("http://localhost:1", model="m") as client:
        with pytest.raises(InputError, match="messages must be .*complete takes"):
            client.chat("Hi")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="prompts must be .*complete takes"):
            client.complete_many("Hi")
        with pytest.raises(ClearboxError, match="does not answer") as found:
            client.complete_many(["a", "b"], concurrency=1)
    assert found.value.__notes__ == ["prompts[0] is 'a'"]


def lines() -> bytes:
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": "b"}], "readouts": {"risk": RISK}},
        reply(choices=[{"index": 0, "text": "c", "finish_reason": "stop"}]),
    ]
    told = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
    return f": a comment\n\n{told}data: [DONE]\n\n".encode()


def test_a_stream_yields_text_rows_and_readouts_as_they_come() -> None:
    sent: list[Any] = []
    handler = answering(sent, httpx.Response(200, content=lines()))
    with served(handler) as url, Client(url) as client:
        first, last = client.stream("a", capture={"inline": {}})
    assert sent[0][1]["capture_stream"] is True
    assert (first.text, last.text, last.finish_reason) == ("b", "c", "stop")
    assert not first.rows and first.readouts["risk"]["values"][0] == 0.5
    assert last.rows[3, "post_block"].values.shape == (3, 4)


def test_a_chunk_has_the_rows_of_each_choice() -> None:
    payload = {"0": [entry(torch.ones(2, 4))], "1": [entry(torch.zeros(1, 4))]}
    told = {"inline": {"status": "pending", "payload": payload}}
    choices = [{"index": 1, "text": "b"}]
    chunk = Chunk.of({"choices": choices, "capture_results": told})
    assert not chunk.rows[3, "post_block"].values.any()
    assert [len(chunk.rows_of[i][3, "post_block"]) for i in (0, 1)] == [2, 1]


def test_an_error_has_parameter_value_and_remedy() -> None:
    message = (
        "capture.inline.hooks.post_block: this model has no layer 99; the last is 5 "
        "(parameter=capture.inline.hooks, value=[99])"
    )
    body = {"error": {"message": message, "param": None, "code": 400}}
    handler = answering([], httpx.Response(400, json=body))
    with served(handler) as url, Client(url) as client:
        for ask in (client.complete, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(ClearboxError) as caught:
                ask("a")
            error = caught.value
            assert (error.status, error.parameter) == (400, "capture.inline.hooks")
            assert error.value == "[99]" and error.remedy == "the last is 5"
            assert error.message.endswith("the last is 5")


def test_an_error_within_a_stream_has_the_status_of_its_event() -> None:
    event = {"error": {"message": "no such name", "param": "x", "code": 400}}
    answer = httpx.Response(200, content=f"data: {json.dumps(event)}\n\n".encode())
    with (
        served(answering([], answer)) as url,
        Client(url) as client,
        pytest.raises(ClearboxError, match="no such name") as caught,
    ):
        list(client.stream("a"))
    assert caught.value.status == 400


def test_arrays_are_sent_as_lists_and_openais_address_is_understood() -> None:
    sent: list[Any] = []
    handler = answering(sent, httpx.Response(200, json=reply()))
    vectors = {"post_block": {5: np.ones(2), 6: {"vector": torch.zeros(2)}}}
    with served(handler) as url, Client(f"{url}/v1/") as client:
        client.complete("a", steering_vectors=vectors)
        client.register_module("name", vectors)
    wanted = {"post_block": {"5": [1.0, 1.0], "6": {"vector": [0.0, 0.0]}}}
    assert [path for path, _ in sent] == [
        "/v1/completions",
        "/v1/steering/modules/register",
    ]
    assert sent[0][1]["steering_vectors"] == sent[1][1]["vectors"] == wanted


def test_no_server_and_no_json_are_errors_too() -> None:
    with Client("http://127.0.0.1:9", model="m") as client:
        for ask in (client.complete, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(ClearboxError, match="does not answer") as caught:
                ask("a")
            assert caught.value.status == 0 and "start it" in str(caught.value.remedy)
    handler = answering([], httpx.Response(502, text="bad gateway"))
    with (
        served(handler) as url,
        Client(url) as client,
        pytest.raises(ClearboxError, match="bad gateway"),
    ):
        client.complete("a")


def test_notebooks_show_a_table_and_a_heat_map() -> None:
    rows = RowSet.of([entry(torch.ones(3, 4)), entry(torch.ones(40, 4), 4)], None)
    table = rows[3, "post_block"]._repr_html_()
    assert table.count("<tr>") == 4 and "#11" in table
    assert "and 10 more" in rows[4, "post_block"]._repr_html_()
    picture = rows._repr_html_()
    assert picture.count("<rect") == 43 and "position 5 #11: 2" in picture
    assert RowSet({})._repr_html_() == "<i>no rows</i>"
    assert repr(rows[3, "post_block"]) == "Rows(layer 3, post_block, [3, 4] float32)"
    assert repr(rows).startswith("RowSet([Rows(layer 3, post_block,")
    values = {"kind": "probe", "positions": [4], "taps": [[3, "post_block"]]}
    told = Readout.of({**values, "values": [[0.5]], "note": "before"})
    assert (
        repr(told)
        == "Readout(probe, 1 positions, 1 taps, values [1, 1], note='before')"
    )


def test_the_client_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, clearbox_client; "
        "assert not {'torch', 'vllm', 'httpx'} & set(sys.modules), 'too much'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CLIENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    shutil.copytree(CLIENT, tmp_path / "client")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(tmp_path / "client")], check=True)
    (wheel,) = tmp_path.glob("clearbox_client-*-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if "dist-info" not in name}
        (metadata,) = (n for n in opened.namelist() if n.endswith("METADATA"))
        needs = opened.read(metadata).decode()
    sources = (CLIENT / "clearbox_client").rglob("*")
    pages = (CLIENT / "clearbox_client" / "page").rglob("*")
    files = {one for one in (*sources, *pages) if one.is_file()}
    files = {one for one in files if "__pycache__" not in one.parts}
    assert packed == {one.relative_to(CLIENT).as_posix() for one in files}
    assert "Requires-Dist: numpy" in needs and "Requires-Dist: torch" not in needs


def chunk_of(text: str, ids: list[int], positions: list[int]) -> Any:
    risk = {
        "kind": "probe",
        "positions": positions,
        "taps": [],
        "values": [[float(p)] for p in positions],
        "num_prompt_tokens": 3,
    }
    choice = {"index": 0, "text": text, "token_ids": ids}
    return {"choices": [choice], "readouts": {"risk": risk} if positions else None}


def test_a_streams_texts_are_paired_with_the_values_of_their_own_tokens() -> None:
    events = [
        chunk_of("a", [7], [0, 1, 2]),
        chunk_of("bc", [8, 9], [3]),
        chunk_of("", [10], [4, 5]),
        chunk_of("d", [11], []),
        chunk_of("e", [12], [0, 1, 2, 3, 4, 5, 6, 7]),
    ]
    chunks = [Chunk.of(event) for event in events]
    found = [
        (text, None if values is None else values.ravel().tolist())
        for text, values in paired(chunks, "risk")
    ]
    assert found == [
        ("a", [3.0]),
        ("bc", [4.0, 5.0]),
        ("", [6.0]),
        ("d", [7.0]),
        ("e", None),
    ]
    for name, array in (("other", "values"), ("risk", "other")):
        with pytest.raises(InputError):
            list(paired(chunks, name, array))
