# SPDX-License-Identifier: Apache-2.0
"""Steering over HTTP, against a served model."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.server import Server
from vllm.steering.vectors import vector_set

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = {"Authorization": "Bearer secret"}
HIDDEN = 64
rng = np.random.default_rng(0)
VECTOR = (rng.normal(size=HIDDEN) * 3).astype(np.float32)
Body = dict[str, Any]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of the server, on which `VECTOR` is named `loud`."""
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        change(opened, "modules/register", name="loud", vectors=spec())
        yield opened
        change(opened, "modules/unregister", name="loud")


def change(client: httpx.Client, what: str, **body: Any) -> Body:
    """The answer to a change of steering."""
    response = client.post(f"/v1/steering/{what}", json=body, headers=KEY)
    assert response.status_code == 200, response.text
    told: Body = response.json()
    return told


def spec(vector: Any = VECTOR, layer: int = 2) -> dict[str, Any]:
    return {"post_block": {str(layer): np.asarray(vector).tolist()}}


def packed(**changes: Any) -> dict[str, Any]:
    form = {
        "dtype": "float32",
        "shape": [1, HIDDEN],
        "layer_indices": [2],
        "data": base64.b64encode(VECTOR.tobytes()).decode(),
    }
    return {"post_block": {**form, **changes}}


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": "The dog went",
        "max_tokens": 8,
        "temperature": 0,
    }
    return client.post("/v1/completions", json={**body, "logprobs": 1, **fields})


def answer(response: httpx.Response) -> tuple[str, list[float]]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def same(one: tuple[str, list[float]], other: tuple[str, list[float]]) -> bool:
    return one[0] == other[0] and bool(np.allclose(one[1], other[1], atol=1e-4))


def test_every_way_to_give_a_vector_does_the_same(client: httpx.Client) -> None:
    plain = answer(complete(client))
    inline = answer(complete(client, steering_vectors=spec()))
    assert not same(plain, inline)
    ways: list[dict[str, Any]] = [
        {"steering_vectors": packed()},
        {"steering_name": "loud"},
        {"prefill_steering_vectors": spec(), "decode_steering_vectors": spec()},
        {"steering_vectors": spec(VECTOR * 2), "steering_name": "half less"},
        {"steering_vectors": packed(scales=[0.5]), "steering_name": "half"},
    ]
    change(client, "modules/register", name="half", vectors=packed(scales=[0.5]))
    change(client, "modules/register", name="half less", vectors=spec(-VECTOR))
    for way in ways:
        assert same(answer(complete(client, **way)), inline), way
    modules = client.get("/v1/steering/modules").json()["modules"]
    assert sorted(modules) == ["half", "half less", "loud"]
    norm = modules["loud"]["vectors"]["post_block"]["2"]["norm"]
    assert norm == pytest.approx(float(np.linalg.norm(VECTOR)), rel=1e-5)
    for name in ("half", "half less"):
        change(client, "modules/unregister", name=name)
    assert complete(client, steering_name="half").status_code == 400
    assert same(answer(complete(client)), plain)


def test_chat_and_streams_are_steered(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "Tell me about the dog."}]
    body["logprobs"] = True

    def chat(**fields: Any) -> list[float]:
        response = client.post("/v1/chat/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        content = response.json()["choices"][0]["logprobs"]["content"]
        return [entry["logprob"] for entry in content]

    assert not np.allclose(chat()[:3], chat(steering_name="loud")[:3], atol=1e-3)
    expected = answer(complete(client, steering_vectors=spec()))[0]
    response = complete(client, steering_vectors=spec(), stream=True)
    chunks = events(response)
    assert "".join(one["choices"][0]["text"] for one in chunks) == expected
    for fields in ({"steering_name": "loud"}, {"steering_vectors": packed()}):
        sent = {**body, **fields, "stream": True}
        chunks = events(client.post("/v1/chat/completions", json=sent))
        found = [
            entry["logprob"]
            for one in chunks
            for entry in (one["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert np.allclose(found, chat(steering_name="loud"), atol=1e-4), fields


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream without its end."""
    assert response.status_code == 200, response.text
    lines = [ln[6:] for ln in response.text.splitlines() if ln.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_every_conversation_of_a_batch_is_steered(client: httpx.Client) -> None:
    conversations = [
        [{"role": "user", "content": text}]
        for text in ("Tell me about the dog.", "Where is Anna?")
    ]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "steering_name": "loud"}

    def texts(path: str, messages: Any, **changes: Any) -> list[str]:
        sent = {**body, "messages": messages, **changes}
        response = client.post(f"/v1/chat/completions{path}", json=sent)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        return [choice["message"]["content"] for choice in choices]

    alone = texts("", conversations[0]) + texts("", conversations[1])
    assert texts("/batch", conversations) == alone
    assert texts("/batch", conversations, steering_name=None) != alone
    inline = {"steering_name": None, "steering_vectors": packed()}
    assert texts("/batch", conversations, **inline) == alone
    bad = {**body, "messages": conversations, "steering_name": "nobody"}
    refused = client.post("/v1/chat/completions/batch", json=bad)
    assert refused.status_code == 400 and "nobody" in refused.text


def test_a_batch_has_a_receipt_for_each_conversation(client: httpx.Client) -> None:
    def receipts(*texts: str, **changes: Any) -> Any:
        asked = [[{"role": "user", "content": text}] for text in texts]
        body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": asked}
        body |= {"steering_vectors": spec(), "steering_receipt": True, **changes}
        response = client.post("/v1/chat/completions/batch", json=body)
        assert response.status_code == 200, response.text
        return response.json()["steering"]

    alone = receipts("Where is Anna?")
    assert [one["op"] for one in alone["applied"]] == ["add"]
    several = receipts("Where is Anna?", "Tell me about the old dog and Anna.")
    assert list(several) == ["0", "1"]
    told, other = (one["applied"][0]["tokens"] for one in several.values())
    assert told == alone["applied"][0]["tokens"] != other
    assert receipts("Where is Anna?", steering_receipt=False) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"steering_vectors": spec(layer=6)}, "layer 6"),
    ({"steering_vectors": packed(dtype="int8")}, "int8"),
    ({"steering_vectors": packed(data="@@")}, "base64"),
    ({"steering_vectors": packed(shape=[2, HIDDEN])}, "bytes"),
    ({"steering_vectors": packed(scales=[1, 2])}, "scales"),
    ({"steering_vectors": packed(layer_indices=[True])}, "0-based"),
    ({"steering_vectors": packed(extra=1)}, "extra"),
    ({"steering_name": "nobody"}, "nobody"),
    ({"steering_vectors": 7}, "steering_vectors"),
    ({"steering_name": "loud", "use_beam_search": True, "n": 2}, "beam search"),
    ({"steering_name": "loud", "steering_receipt": "true"}, "steering_receipt"),
]


@pytest.mark.parametrize(("fields", "said"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_with_a_reason(
    client: httpx.Client, fields: dict[str, Any], said: str
) -> None:
    response = complete(client, **fields)
    assert response.status_code == 400, response.text
    assert said in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_that_overflows_is_an_error_of_its_request_only(
    client: httpx.Client, stream: bool
) -> None:
    words = " ".join(["dog"] * 61)
    plain = answer(complete(client, prompt=words))
    huge = np.full(HIDDEN, 3e38)
    vectors = {"post_block": {str(n): huge.tolist() for n in (0, 1)}}
    lost = complete(client, prompt=words, steering_vectors=vectors, stream=stream)
    if stream:
        (error,) = (one["error"] for one in events(lost))
    else:
        assert lost.status_code == 400
        error = lost.json()["error"]
    assert error["code"] == 400 and error["param"] == "steering_vectors"
    assert "reached the attention of layer 2; " in error["message"]
    others = [" ".join(["cat"] * number) for number in (5, 33, 61)]
    for other in [words, *others]:
        _, numbers = found = answer(complete(client, prompt=other))
        assert np.isfinite(numbers).all()
        assert other != words or found == plain


CLAMP = {"vector": VECTOR.tolist(), "min": -0.5, "max": 0.5, "strength": 0.75}
PROBE = {"probe": VECTOR.tolist(), "layer": 1, "hook": "post_attn"}


def receipt(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = complete(client, steering_receipt=True, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["steering"]
    return found


def test_conditions_act_over_http_and_firings_are_counted(client: httpx.Client) -> None:
    def when(**more: Any) -> dict[str, Any]:
        entry = {"vector": VECTOR.tolist(), "when": {**PROBE, **more}}
        return {"steering_vectors": {"post_block": {"2": [entry]}}}

    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        name = "vllm:steering_fired_tokens_total{"
        own = [ln for ln in lines if ln.startswith(name) and 'hook="post_attn"' in ln]
        return float(own[0].rsplit(" ", 1)[1]) if own else 0.0

    plain = answer(complete(client))
    always = answer(complete(client, steering_vectors=spec()))
    before = counted()
    assert same(answer(complete(client, **when(below=-1e6))), plain)
    assert counted() == before
    assert same(answer(complete(client, **when(above=-1e6))), always)
    assert counted() > before
    before = counted()
    (fired,) = receipt(client, **when(above=-1e6))["fired"].values()
    assert fired["first"] == 0 and fired["tokens"] == fired["decided"]
    assert counted() == before + fired["tokens"] > before
    shared = when(above=1.0, scope="prompt", reduce="mean")["steering_vectors"]
    refused = client.post("/v1/steering/set", json={"vectors": shared}, headers=KEY)
    assert refused.status_code == 400 and "mean over the prompt" in refused.text


def test_a_receipt_comes_with_the_response_and_the_last_chunk(
    client: httpx.Client,
) -> None:
    entry = {"post_block": {"2": [{**CLAMP, "op": "clamp"}]}}
    told = receipt(client, steering_vectors=entry, steering_name="loud")
    assert [one["op"] for one in told["applied"]] == ["add", "clamp"]
    added, clamped = told["applied"]
    assert added["hook"] == "post_block" and added["layer"] == 2
    assert 0 < clamped["tokens"] <= added["tokens"]
    assert added["dose"]["max"] >= added["dose"]["mean"] > 0
    plain = complete(client, steering_vectors=entry).json()
    assert not plain.get("steering")
    assert receipt(client) == {"applied": [], "fired": {}}
    fields = {"steering_vectors": entry, "steering_name": "loud"}
    *early, last = events(
        complete(client, stream=True, steering_receipt=True, **fields)
    )
    assert last["steering"] == told
    assert not any(one.get("steering") for one in early)
    several = receipt(client, prompt=["The dog went"] * 2, **fields)
    assert list(several) == ["0", "1"]
    for one in several.values():
        for entry, expected in zip(one["applied"], told["applied"], strict=True):
            assert entry["tokens"] == expected["tokens"]
            assert entry["dose"] == pytest.approx(expected["dose"], rel=1e-4)
    chat = {"model": "tiny", "max_tokens": 4, "temperature": 0, "steering_name": "loud"}
    chat["messages"] = [{"role": "user", "content": "Tell me about the dog."}]
    chat["steering_receipt"] = True
    found = client.post("/v1/chat/completions", json=chat).json()["steering"]
    assert [one["op"] for one in found["applied"]] == ["add"]
    streamed = events(
        client.post("/v1/chat/completions", json={**chat, "stream": True})
    )
    assert [one["steering"] for one in streamed if one.get("steering")] == [found]
    refused = complete(client, steering_receipt="yes please")
    assert refused.status_code == 400 and "steering_receipt" in refused.text


def test_the_example_of_openais_client_runs(
    client: httpx.Client, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.steering import openai_client

    monkeypatch.setattr(openai_client, "TONE", tmp_path / "tone.safetensors")
    vector_set({(2, "post_block"): VECTOR}).save(openai_client.TONE)
    change(client, "modules/register", name="tone", vectors=spec())
    openai_client.main(["--url", f"{client.base_url}/v1", "--model", "tiny"])
    said = dict(
        line.split(":", 1) for line in capsys.readouterr().out.splitlines() if line
    )
    assert list(said) == ["unsteered", "by name", "by vector", "chat", "refused"]
    texts = [text.strip() for text in said.values()]
    assert all(texts) and texts[2] not in texts[:2]
    assert "layer 99" in said["refused"]
    change(client, "modules/unregister", name="tone")
