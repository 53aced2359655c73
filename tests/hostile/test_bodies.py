# SPDX-License-Identifier: Apache-2.0
"""Small bodies cause little work; large ones are refused while others are served."""

import base64
import json
from collections.abc import Callable
from math import prod
from typing import Any

import pyarrow
import pytest

from tests.hostile.client import Client, watching
from tests.hostile.conftest import WIDTH
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BASE = {"model": "tiny", "prompt": [20, 30, 40], "max_tokens": 2}
ONE = [0.01] * WIDTH


def captured(**spec: Any) -> bytes:
    spec = {"hooks": {"post_block": [0]}, **spec}
    return json.dumps(BASE | {"capture": {"inline": spec}}).encode()


def steered(spec: Any, field: str = "steering_vectors") -> bytes:
    return json.dumps(BASE | {field: spec}).encode()


def packed(**changes: Any) -> bytes:
    form = {"dtype": "float32", "shape": [1, WIDTH], "layer_indices": [0], "data": ""}
    return steered({"post_block": form | changes})


REFUSED: dict[str, Callable[[], bytes]] = {
    "thirty million positions": lambda: captured(positions="MANY").replace(
        b'"MANY"', b"[" + b"1," * (33 << 20) + b"1]"
    ),
    "a million positions": lambda: captured(positions=[*range(1_000_000)]),
    "sixty thousand ranges": lambda: captured(
        hooks={"post_block": {"ranges": [[0, 0]] * 60_000}}
    ),
    "sixty thousand hook points": lambda: captured(
        hooks={f"hook{n}": 0 for n in range(60_000)}
    ),
    "a million layers": lambda: captured(hooks={"post_block": [0] * 1_000_000}),
    "sixty thousand layers": lambda: captured(hooks={"post_block": [7] * 60_000}),
    "a long consumer": lambda: json.dumps(
        BASE | {"capture": {"x" * 20_000_000: {}}}
    ).encode(),
    "a long hook point": lambda: captured(hooks={"x" * 4000: [0]}),
    "a long text for positions": lambda: captured(positions="x" * 60_000_000),
    "deep capture": lambda: captured(positions="DEEP").replace(
        b'"DEEP"', b"[" * 900 + b"]" * 900
    ),
    "a boolean shape": lambda: packed(shape=[True, 192]),
    "a shape of many": lambda: packed(shape=[2**31 - 1, 2**31 - 1]),
    "too much data": lambda: packed(data="A" * 60_000_000),
    "a million packed layers": lambda: packed(layer_indices=[0] * 1_000_000),
    "a long operation": lambda: steered(
        {"post_block": {"0": {"vector": ONE, "op": "x" * 20_000_000}}}
    ),
    "ten thousand entries": lambda: steered(
        {"post_block": {"0": [{"vector": [1]}] * 10_000}}
    ),
    "scattered positions": lambda: steered(
        {
            "post_block": {
                "0": [{"vector": ONE, "positions": [*range(0, 120_000, 2)]}] * 2
            }
        }
    ),
    "a bound that no float32 holds": lambda: steered(
        {"post_block": {"0": {"vector": ONE, "op": "clamp", "max": 1e39}}}
    ),
    "a long unknown name": lambda: json.dumps(
        BASE | {"steering_name": "n" * 20_000_000}
    ).encode(),
}


CHATS, INVOKED = "/v1/chat/completions", "/invocations"
CHAT = {"model": "tiny", "max_tokens": 2}
TEXT = {"role": "user", "content": "a story"}


def chat(**changes: Any) -> bytes:
    return json.dumps(CHAT | {"messages": [TEXT]} | changes).encode()


INTERP = "/v1/interp-engine"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def xargs(**args: Any) -> bytes:
    return json.dumps(BASE | {"vllm_xargs": args}).encode()


def read(**readout: Any) -> bytes:
    readout = {"hooks": {"post_block": [0]}} | readout
    return json.dumps(BASE | {"readouts": {"own": readout}}).encode()


def interp(**body: Any) -> bytes:
    return json.dumps({"prompt_token_ids": [20, 30, 40]} | body).encode()


def zeros(*shape: int) -> dict[str, Any]:
    data = base64.b64encode(bytes(4 * prod(shape))).decode()
    return {"dtype": "float32", "shape": list(shape), "data": data}


def unpacking(size: int) -> dict[str, Any]:
    """A steering vector of vllm-lens that is small until it is unpacked."""
    data = pyarrow.compress(bytes(size), "zstd", asbytes=True)
    activations = {
        "data": base64.b64encode(data).decode(),
        "dtype": "float32",
        "shape": [1, size // 4 // WIDTH, WIDTH],
        "compression": "zstd",
    }
    return {"activations": activations, "layer_indices": [0]}


REFUSED_ELSEWHERE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "numbers as messages": (CHATS, lambda: chat(messages=[1] * 130_000)),
    "numbers as tools": (CHATS, lambda: chat(tools=[1] * 130_000)),
    "a long prompt for all routes": (
        INVOKED,
        lambda: json.dumps(BASE | {"prompt": "a story " * 3_000_000}).encode(),
    ),
    "numbers as messages for all routes": (
        INVOKED,
        lambda: chat(messages=[1] * 130_000),
    ),
    "a list for all routes": (INVOKED, lambda: b"[1, 2]"),
    "a deep list in a text": (
        "/v1/completions",
        lambda: xargs(output_residual_stream="[" * 50_000),
    ),
    "deep vectors in a text": (
        "/v1/completions",
        lambda: xargs(apply_steering_vectors='{"a":' * 20_000),
    ),
    "deep hooks in a text": (
        "/v1/completions",
        lambda: xargs(apply_hooks="[" * 900 + "]" * 900),
    ),
    "many values in a text": (
        "/v1/completions",
        lambda: xargs(output_residual_stream=json.dumps([0] * 10_000_000)),
    ),
    "a vector that unpacks to a gigabyte": (
        "/v1/completions",
        lambda: xargs(apply_steering_vectors=json.dumps([unpacking(1 << 30)])),
    ),
    "vectors that unpack to a gigabyte": (
        "/v1/completions",
        lambda: xargs(apply_steering_vectors=json.dumps([unpacking(1 << 24)] * 64)),
    ),
    "a prompt of a book": (
        f"{INTERP}/tokenize",
        lambda: json.dumps({"text": "a story " * 2_000_000}).encode(),
    ),
    "a template of one's own": (
        f"{INTERP}/tokenize",
        lambda: json.dumps(
            {"messages": [TEXT], "template_kwargs": {"chat_template": LOOPS}}
        ).encode(),
    ),
    "rows again and again": (
        f"{INTERP}/capture",
        lambda: interp(points=["resid_post.1"], rows=[0] * 500_000),
    ),
    "points again and again": (
        f"{INTERP}/capture",
        lambda: interp(points=["resid_post.1"] * 60_000),
    ),
    "unknown points": (
        f"{INTERP}/serves",
        lambda: json.dumps({"points": [f"z.{n}" for n in range(60_000)]}).encode(),
    ),
    "layers again and again": (
        f"{INTERP}/lens",
        lambda: interp(lenses=[{"layers": [0] * 60_000}]),
    ),
    "lenses of everything": (
        f"{INTERP}/lens",
        lambda: interp(
            prompt_token_ids=[5] * 250, lenses=[{"layers": [0, 1, 2]}] * 8, top_n=100
        ),
    ),
    "many numbers of rows": (
        f"{INTERP}/decode_residuals",
        lambda: json.dumps({"residuals": zeros(2000, WIDTH), "top_k": 1280}).encode(),
    ),
    "readouts of everything": (
        "/v1/completions",
        lambda: json.dumps(
            BASE
            | {
                "prompt": [5] * 200,
                "n": 32,
                "readouts": {
                    f"r{n}": {
                        "kind": "norm",
                        "hooks": {"pre_attn": "all", "post_block": "all"},
                        "positions": "all",
                    }
                    for n in range(64)
                },
            }
        ).encode(),
    ),
    "tokens again and again": (
        f"{INTERP}/unembed_rows",
        lambda: json.dumps({"token_ids": [5] * 1_000_000}).encode(),
    ),
    "many rows for the head": (
        f"{INTERP}/decode_residuals",
        lambda: json.dumps({"residuals": zeros(100_000, WIDTH)}).encode(),
    ),
    "many directions": (
        f"{INTERP}/project",
        lambda: interp(
            prompt_token_ids=[5] * 250,
            directions=[{"point": "resid_post.1", "vectors": zeros(100_000, WIDTH)}],
        ),
    ),
    "a bias without a dimension": (
        f"{INTERP}/project",
        lambda: interp(
            directions=[
                {"point": "resid_post.1", "vectors": [ONE], "bias": zeros()},
            ]
        ),
    ),
    "an empty tensor of great length": (
        f"{INTERP}/decode_residuals",
        lambda: json.dumps(
            {"residuals": {"dtype": "float32", "shape": [2**40, 0], "data": ""}}
        ).encode(),
    ),
    "a long seed": (f"{INTERP}/generate", lambda: interp(seed=2**63)),
    "no end": (
        f"{INTERP}/lens",
        lambda: interp(lenses=[{"layers": [0]}], max_tokens=2**40),
    ),
    "a long model": (
        "/v1/completions",
        lambda: json.dumps(BASE | {"model": "x" * 60_000_000}).encode(),
    ),
}
REFUSALS = (400, 404, 413, 422)
EVERYWHERE = {
    what: ("/v1/completions", make) for what, make in REFUSED.items()
} | REFUSED_ELSEWHERE


@pytest.mark.parametrize("what", EVERYWHERE)
def test_it_is_refused_in_few_words(client: Client, what: str) -> None:
    path, make = EVERYWHERE[what]
    reply = client.send("POST", path, make())
    assert reply.status in REFUSALS, reply
    assert (
        reply.body["detail"]
        if "detail" in reply.body
        else reply.body["error"]["message"]
    )
    assert len(str(reply.body)) < 10_000


@pytest.mark.hostile
def test_nobody_waits_for_what_is_refused(attacked: Server, client: Client) -> None:
    worst = {}
    for what, (path, make) in EVERYWHERE.items():
        raw = make()
        with watching(attacked) as watch:
            assert client.send("POST", path, raw).status in REFUSALS
        worst[what] = max(watch.owned, default=0.0)
    print({what: round(seconds, 3) for what, seconds in worst.items()})
    assert max(worst.values()) <= 0.25, worst


def test_many_operations_at_the_end_of_a_prompt_cost_what_the_prompt_has(
    client: Client,
) -> None:
    entry = {"vector": ONE, "op": "project_out", "positions": {"last": 65536}}
    spec = {hook: {str(n): [entry] * 8 for n in range(3)} for hook in
            ("pre_attn", "post_attn", "post_block")}  # fmt: skip
    body = BASE | {"steering_vectors": spec, "decode_steering_vectors": None}
    reply = client.post("/v1/completions", body)
    assert reply.status == 200, reply


def test_errors_list_few_names(client: Client, steerer: Client) -> None:
    for n in range(60):
        named = {
            "name": f"many-{n:02}-{'n' * 100}",
            "vectors": {"post_block": {"0": ONE}},
        }
        assert steerer.post("/v1/steering/modules/register", named).status == 200
    unknown = client.post("/v1/completions", BASE | {"steering_name": "other"})
    assert unknown.status == 400 and "44 more" in str(unknown.body)
    assert len(str(unknown.body)) < 4000
    for n in range(60):
        named = {"name": f"many-{n:02}-{'n' * 100}"}
        assert steerer.post("/v1/steering/modules/unregister", named).status == 200


def test_upstreams_messages_repeat_little_of_what_was_sent(client: Client) -> None:
    for path in ("/v1/completions", "/tokenize"):
        body = BASE | {"model": "x" * 10**6, "prompt": "a story"}
        reply = client.post(path, body)
        assert reply.status == 404, reply
        assert len(str(reply.body)) < 10_000
        assert "does not exist" in str(reply.body)


@pytest.mark.parametrize("path", ["A" * 5000, "é" * 300 + ".safetensors", "\x00", "/"])
@pytest.mark.parametrize("routes", ["/v1/readouts/modules", "/v1/sae"])
def test_a_path_that_no_file_can_have_is_refused(
    client: Client, steerer: Client, routes: str, path: str
) -> None:
    body = {"name": "unreadable", "path": path}
    reply = steerer.post(f"{routes}/register", body)
    assert reply.status == 400 and "path" in str(reply.body), reply
    assert len(str(reply.body)) < 4000
    assert "unreadable" not in client.get(routes).body["modules"]
