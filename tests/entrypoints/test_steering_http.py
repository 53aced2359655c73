# SPDX-License-Identifier: Apache-2.0
"""Steering over HTTP, against a served model."""

import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.demo import serving
from tests.v1.residual.sae import _layouts
from vllm.steering.vectors import load_vectors

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/demo_model/weights"
HIDDEN = 192
# Random keys, because a log that contains paths, models and options is searched for
# them.
SERVER_KEY, OLD_KEY, NEW_KEY, ENV_KEY = (secrets.token_hex(16) for _ in range(4))
rng = np.random.default_rng(0)
VECTOR = (rng.normal(size=HIDDEN) * 3).astype(np.float32)


@pytest.fixture(scope="module")
def client(tmp_path_factory: Any) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("server")
    module = folder / "loud.safetensors"
    save_file(
        {"post_block.2": VECTOR},
        module,
        metadata={
            "format": "clearbox-steering-v1",
            "layer_convention": "0-based block index",
        },
    )
    port = serving.free_port(8790)
    url = f"http://{serving.HOST}:{port}"
    options = [str(MODEL), "--served-model-name", "m", "--enable-steering"]
    options += ["--steering-api-key", OLD_KEY, "--steering-api-key", NEW_KEY]
    options += ["--steering-modules", f"loud={module}", "--api-key", SERVER_KEY]
    options += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    environment = {**serving.ENVIRONMENT, "VLLM_STEERING_API_KEY": ENV_KEY}
    # its log is read, independent of other tests
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    with serving.running(
        serving.serve_command(port, options),
        url,
        folder / "log",
        240,
        lambda _, __: None,
        environment,
    ):
        log = (folder / "log").read_text()
        assert "non-default args" in log
        assert not [key for key in (OLD_KEY, NEW_KEY, ENV_KEY) if key in log]
        with httpx.Client(base_url=url, timeout=60) as found:
            found.headers["Authorization"] = f"Bearer {SERVER_KEY}"
            yield found


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


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
    body = {"model": "m", "prompt": "The dog went", "max_tokens": 8, "temperature": 0}
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
    half = {"vectors": packed(scales=[0.5]), "name": "half"}
    less = {"vectors": spec(-VECTOR), "name": "half less"}
    for module in (half, less):
        made = client.post(
            "/v1/steering/modules/register", json=module, headers=by(NEW_KEY)
        )
        assert made.status_code == 200, made.text
    for way in ways:
        assert same(answer(complete(client, **way)), inline), way
    modules = client.get("/v1/steering/modules").json()["modules"]
    assert sorted(modules) == ["half", "half less", "loud"]
    norm = modules["loud"]["vectors"]["post_block"]["2"]["norm"]
    assert norm == pytest.approx(float(np.linalg.norm(VECTOR)), rel=1e-5)
    for name in ("half", "half less"):
        gone = client.post(
            "/v1/steering/modules/unregister", json={"name": name}, headers=by(NEW_KEY)
        )
        assert gone.status_code == 200
    assert complete(client, steering_name="half").status_code == 400
    assert same(answer(complete(client)), plain)


def test_chat_and_streams_are_steered(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": 8, "temperature": 0}
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


def test_every_prompt_of_a_list_is_steered(client: httpx.Client) -> None:
    prompts = ["The dog went", "Anna has a"]
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "steering_name": "loud"}

    def texts(prompt: Any, **changes: Any) -> list[str]:
        sent = {**body, "prompt": prompt, **changes}
        response = client.post("/v1/completions", json=sent)
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]

    alone = texts(prompts[0]) + texts(prompts[1])
    assert texts(prompts) == alone
    assert texts(prompts, steering_name=None) != alone


def test_every_conversation_of_a_batch_is_steered(client: httpx.Client) -> None:
    conversations = [
        [{"role": "user", "content": text}]
        for text in ("Tell me about the dog.", "Where is Anna?")
    ]
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "steering_name": "loud"}

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
        body = {"model": "m", "max_tokens": 4, "temperature": 0, "messages": asked}
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


def test_a_name_to_unregister_must_be_given(client: httpx.Client) -> None:
    url = "/v1/steering/modules/unregister"
    for body, status in (({"name": "nobody"}, 404), ({}, 400), ({"name": 3}, 400)):
        response = client.post(url, json=body, headers=by(NEW_KEY))
        assert response.status_code == status, response.text


def test_global_vectors_are_set_merged_read_and_cleared(client: httpx.Client) -> None:
    plain = answer(complete(client))
    steered = answer(complete(client, steering_vectors=spec()))

    def post(what: str, body: Any) -> httpx.Response:
        url = f"/v1/steering/{what}"
        return client.post(url, json=body, headers=by(ENV_KEY))

    first = post("set", {"vectors": spec()})
    assert first.status_code == 200, first.text
    assert list(first.json()["vectors"]["post_block"]) == ["2"]
    (applied,) = first.json()["applied"]
    assert applied["norm"] == pytest.approx(float(np.linalg.norm(VECTOR)), rel=1e-5)
    assert (applied["hook"], applied["layer"], applied["scale"]) == ("post_block", 2, 1)
    assert first.json()["rows_in_use"] == 2
    assert same(answer(complete(client)), steered)
    merged = post("set", {"vectors": {"pre_attn": {"0": VECTOR.tolist()}}}).json()
    assert sorted(merged["vectors"]) == ["post_block", "pre_attn"]
    state = client.get("/v1/steering").json()
    assert state["vectors"] == merged["vectors"]
    assert state["max_configs"] == 4 and state["configs_in_use"] == 0
    replaced = post("set", {"decode_vectors": spec(), "replace": True}).json()
    assert replaced["vectors"] == {} and "post_block" in replaced["decode_vectors"]
    assert (
        post("set", {"decode_vectors": spec([0] * HIDDEN)}).json()["decode_vectors"]
        == {}
    )
    assert post("clear", {}).status_code == 200
    assert same(answer(complete(client)), plain)


def test_layers_of_the_model_are_listed(client: httpx.Client) -> None:
    told = client.get("/v1/steering/layers").json()
    assert sorted(told["layers"]) == [str(layer) for layer in range(6)]
    assert {"pre_attn", "post_attn", "post_block"} <= set(told["layers"]["0"])
    assert told["hidden_size"] == HIDDEN


@pytest.mark.parametrize("what", ["set", "clear", "modules/register"])
@pytest.mark.parametrize(
    "key",
    [None, "wrong", pytest.param(SERVER_KEY, id="the server's"), "öld"],
)
def test_changes_need_a_steering_key_before_the_body_is_read(
    client: httpx.Client, what: str, key: str | None
) -> None:
    header = f"Bearer {key}" if key else ""
    response = client.post(
        f"/v1/steering/{what}",
        content=b"no json",
        headers={"Authorization": header.encode()},
    )
    assert response.status_code == 401
    for right in (OLD_KEY, NEW_KEY, ENV_KEY):
        url = f"/v1/steering/{what}"
        assert client.post(url, content=b"no", headers=by(right)).status_code == 400


@pytest.mark.parametrize("what", ["", "/layers", "/modules"])
def test_reading_needs_the_servers_key(client: httpx.Client, what: str) -> None:
    url = f"/v1/steering{what}"
    assert client.get(url).status_code == 200
    assert client.get(url, headers=by(NEW_KEY)).status_code == 401


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
    vectors = {"post_block": {str(n): huge.tolist() for n in (1, 2)}}
    lost = complete(client, prompt=words, steering_vectors=vectors, stream=stream)
    if stream:
        (error,) = (one["error"] for one in events(lost))
    else:
        assert lost.status_code == 400
        error = lost.json()["error"]
    assert error["code"] == 400 and error["param"] == "steering_vectors"
    assert "reached the attention of layer 3; " in error["message"]
    others = [" ".join(["cat"] * number) for number in (5, 33, 61)]
    for other in [words, *others]:
        _, numbers = found = answer(complete(client, prompt=other))
        assert np.isfinite(numbers).all()
        assert other != words or found == plain


def test_other_requests_refuse_the_fields(client: httpx.Client) -> None:
    body = {"model": "m", "prompt": "x", "steering_name": "loud"}
    assert client.post("/tokenize", json=body).status_code == 400


def test_a_key_that_is_given_twice_is_refused(client: httpx.Client) -> None:
    one = json.dumps(spec()["post_block"])
    twice = f'{{"post_block": {one}, "post_block": {one}}}'
    request = f'{{"model": "m", "prompt": "x", "steering_vectors": {twice}}}'
    change = f'{{"vectors": {{"post_block": {one}}}, "vectors": {{}}}}'
    for path, body, key, steering_key in (
        ("/v1/completions", request, "post_block", {}),
        ("/v1/steering/set", change, "vectors", by(NEW_KEY)),
    ):
        headers = {"Content-Type": "application/json"} | steering_key
        response = client.post(path, content=body, headers=headers)
        assert response.status_code == 400, response.text
        assert f"the key '{key}' twice" in response.text
    assert client.get("/v1/steering").json()["vectors"] == {}


def test_a_number_that_is_none_is_refused(client: httpx.Client) -> None:
    text = json.dumps({"model": "m", "prompt": "x", "steering_vectors": spec()})
    number = str(float(VECTOR[0]))
    for bad in ("NaN", "Infinity", "-Infinity"):
        broken = text.replace(number, bad, 1)
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/completions", content=broken, headers=headers)
        assert response.status_code == 400, response.text


CLAMP = {"vector": VECTOR.tolist(), "min": -0.5, "max": 0.5, "strength": 0.75}
PROBE = {"probe": VECTOR.tolist(), "layer": 1, "hook": "post_attn"}


def receipt(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = complete(client, steering_receipt=True, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["steering"]
    return found


def test_clamps_do_the_same_as_entries_as_fields_and_packed(
    client: httpx.Client,
) -> None:
    entry = {"post_block": {"2": [{**CLAMP, "op": "clamp"}]}}
    expected = answer(complete(client, steering_vectors=entry))
    assert not same(expected, answer(complete(client)))
    as_packed = packed(bounds=[[-0.5, 0.5]], strengths=[0.75])
    half = {"post_block": {"2": [{**CLAMP, "strength": 0.5}, CLAMP]}}
    for clamps in ({"post_block": {"2": [CLAMP]}}, as_packed):
        assert same(answer(complete(client, steering_clamps=clamps)), expected)
        both = {"prefill_steering_clamps": clamps, "decode_steering_clamps": clamps}
        assert same(answer(complete(client, **both)), expected)
    assert not same(answer(complete(client, steering_clamps=half)), expected)
    bad = packed(bounds=[[0.5, -0.5]])
    refused = complete(client, steering_clamps=bad)
    assert refused.status_code == 400 and "min" in refused.text
    url = "/v1/steering/set"
    made = client.post(url, json={"clamps": as_packed}, headers=by(ENV_KEY))
    assert made.status_code == 200, made.text
    try:
        assert same(answer(complete(client)), expected)
    finally:
        client.post("/v1/steering/clear", json={}, headers=by(ENV_KEY))


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
    soft = answer(complete(client, **when(above=-1e6, sharpness=1e-9)))
    assert not same(soft, plain) and not same(soft, always)
    before = counted()
    (fired,) = receipt(client, **when(above=-1e6))["fired"].values()
    assert fired["first"] == 0 and fired["tokens"] == fired["decided"]
    assert counted() == before + fired["tokens"] > before
    shared = when(above=1.0, scope="prompt", reduce="mean")["steering_vectors"]
    url, body = "/v1/steering/set", {"vectors": shared}
    refused = client.post(url, json=body, headers=by(ENV_KEY))
    assert refused.status_code == 400 and "mean over the prompt" in refused.text
    for bad, said in (
        (when(above=1.0, layer=4), "layer 4"),
        (when(above=1.0, probe=[1.0] * 7), "192 numbers"),
        (when(above=1.0, probe="nobody"), "nobody"),
        (when(), "above"),
        (when(above=1.0, reduce="mean"), "scope"),
    ):
        refused = complete(client, **bad)
        assert refused.status_code == 400 and said in refused.text, refused.text


def test_a_feature_is_set_over_http(client: httpx.Client, tmp_path: Path) -> None:
    parts = _layouts.parts(5, HIDDEN, 64)
    names = ("W_enc", "W_dec", "b_enc", "b_dec")
    place = {"hook_name": "blocks.2.hook_resid_post"}
    folder = _layouts.saelens(
        tmp_path / "sae",
        _layouts.chosen(parts, *names),
        architecture="standard",
        metadata=place,
        d_in=HIDDEN,
        d_sae=64,
    )
    body = {"name": "small", "path": str(folder)}
    made = client.post("/v1/sae/register", json=body, headers=by(NEW_KEY))
    assert made.status_code == 200, made.text

    def feature(**more: Any) -> dict[str, Any]:
        entry = {"op": "feature", "sae": "small", "feature": 3, "value": 40.0, **more}
        return {"steering_vectors": {"post_block": {"2": [entry]}}}

    plain = answer(complete(client))
    assert not same(answer(complete(client, **feature())), plain)
    (entry,) = receipt(client, **feature())["applied"]
    assert entry["op"] == "feature" and entry["dose"]["mean"] > 0
    for bad in (feature(feature=64), feature(sae="large"), feature(mode="square")):
        assert complete(client, **bad).status_code == 400
    gone = client.post(
        "/v1/sae/unregister", json={"name": "small"}, headers=by(NEW_KEY)
    )
    assert gone.status_code == 200


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
    chat = {"model": "m", "max_tokens": 4, "temperature": 0, "steering_name": "loud"}
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


def test_the_example_of_openais_client_runs(client: httpx.Client, capsys: Any) -> None:
    from examples.steering import openai_client

    spec = load_vectors(openai_client.TONE).spec()["post_block"][2]
    body = {"post_block": {"2": {**spec, "vector": spec["vector"].tolist()}}}
    module = {"name": "tone", "vectors": body}
    url = "/v1/steering/modules/register"
    assert client.post(url, json=module, headers=by(NEW_KEY)).status_code == 200
    options = ["--url", f"{client.base_url}/v1", "--model", "m"]
    openai_client.main([*options, "--api-key", SERVER_KEY])
    said = dict(
        line.split(":", 1) for line in capsys.readouterr().out.splitlines() if line
    )
    assert list(said) == ["unsteered", "by name", "by vector", "chat", "refused"]
    texts = [text.strip() for text in said.values()]
    assert all(texts) and texts[2] not in texts[:2]
    assert "layer 99" in said["refused"]
    url = "/v1/steering/modules/unregister"
    client.post(url, json={"name": "tone"}, headers=by(NEW_KEY))


def test_the_client_package_steers_by_packed_vectors_and_by_name(
    client: httpx.Client,
) -> None:
    import clearbox_client

    # So large that no generated text stays the same.
    vectors = clearbox_client.pack({"post_block": {2: VECTOR * 10}})
    greedy: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    url = str(client.base_url)
    with clearbox_client.Client(url, api_key=SERVER_KEY) as asked:
        plain = asked.complete("The dog went", **greedy)
        packed = asked.complete("The dog went", steering_vectors=vectors, **greedy)
        asked.register_module("from a client", vectors, key=NEW_KEY)
        assert "from a client" in asked.modules()["modules"]
        named = asked.complete("The dog went", steering_name="from a client", **greedy)
        assert plain.text != packed.text == named.text
        asked.unregister_module("from a client", key=NEW_KEY)
        with pytest.raises(clearbox_client.ClearboxError, match="from a client"):
            asked.complete("The dog went", steering_name="from a client")
        with pytest.raises(clearbox_client.ClearboxError) as refused:
            asked.register_module("from a client", vectors, key="wrong")
        assert refused.value.status == 401
