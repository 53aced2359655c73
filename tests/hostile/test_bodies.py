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


Body = dict[str, Any]


def captured(**spec: Any) -> Body:
    return {"capture": {"inline": {"hooks": {"post_block": [0]}} | spec}}


def steered(entries: Any) -> Body:
    return {"steering_vectors": {"post_block": {"0": entries}}}


def packed(**changes: Any) -> Body:
    form = {"dtype": "float32", "shape": [1, WIDTH], "layer_indices": [0], "data": ""}
    return {"steering_vectors": {"post_block": form | changes}}


def within(body: Body, place: str, raw: bytes) -> bytes:
    """A body of a completion, with raw bytes in place of a text."""
    return json.dumps(BASE | body).encode().replace(b'"%b"' % place.encode(), raw)


def zeros(*shape: int) -> Body:
    data = base64.b64encode(bytes(4 * prod(shape))).decode()
    return {"dtype": "float32", "shape": list(shape), "data": data}


def unpacking(size: int) -> Body:
    """A steering vector of vllm-lens that is small until it is unpacked."""
    data = pyarrow.compress(bytes(size), "zstd", asbytes=True)
    activations = {
        "data": base64.b64encode(data).decode(),
        "dtype": "float32",
        "shape": [1, size // 4 // WIDTH, WIDTH],
        "compression": "zstd",
    }
    return {"activations": activations, "layer_indices": [0]}


def xargs(**args: Any) -> Body:
    return {"vllm_xargs": args}


def directed(**direction: Any) -> Body:
    return {"directions": [{"point": "resid_post.1"} | direction]}


TEXT = {"role": "user", "content": "a story"}
INTERP = "/v1/interp-engine"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NORMS = {"kind": "norm", "hooks": {"pre_attn": "all", "post_block": "all"}}
NORMS |= {"positions": "all"}
LONG = {"prompt_token_ids": [5] * 250}
ATTACKS: dict[str, dict[str, Callable[[], Body | bytes]]] = {
    "/v1/completions": {
        "thirty million positions": lambda: within(
            captured(positions="MANY"), "MANY", b"[" + b"1," * (33 << 20) + b"1]"
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
        "a long consumer": lambda: {"capture": {"x" * 20_000_000: {}}},
        "a long hook point": lambda: captured(hooks={"x" * 4000: [0]}),
        "a long text for positions": lambda: captured(positions="x" * 60_000_000),
        "deep capture": lambda: within(
            captured(positions="DEEP"), "DEEP", b"[" * 900 + b"]" * 900
        ),
        "a boolean shape": lambda: packed(shape=[True, 192]),
        "a shape of many": lambda: packed(shape=[2**31 - 1, 2**31 - 1]),
        "too much data": lambda: packed(data="A" * 60_000_000),
        "a million packed layers": lambda: packed(layer_indices=[0] * 1_000_000),
        "a long operation": lambda: steered({"vector": ONE, "op": "x" * 20_000_000}),
        "ten thousand entries": lambda: steered([{"vector": [1]}] * 10_000),
        "scattered positions": lambda: steered(
            [{"vector": ONE, "positions": [*range(0, 120_000, 2)]}] * 2
        ),
        "a bound that no float32 holds": lambda: steered(
            {"vector": ONE, "op": "clamp", "max": 1e39}
        ),
        "a long unknown name": lambda: {"steering_name": "n" * 20_000_000},
        "a deep list in a text": lambda: xargs(output_residual_stream="[" * 50_000),
        "deep vectors in a text": lambda: xargs(
            apply_steering_vectors='{"a":' * 20_000
        ),
        "deep hooks in a text": lambda: xargs(apply_hooks="[" * 900 + "]" * 900),
        "many values in a text": lambda: xargs(
            output_residual_stream=json.dumps([0] * 10_000_000)
        ),
        "a vector that unpacks to a gigabyte": lambda: xargs(
            apply_steering_vectors=json.dumps([unpacking(1 << 30)])
        ),
        "vectors that unpack to a gigabyte": lambda: xargs(
            apply_steering_vectors=json.dumps([unpacking(1 << 24)] * 64)
        ),
        "readouts of everything": lambda: {
            "prompt": [5] * 200,
            "n": 32,
            "readouts": {f"r{n}": NORMS for n in range(64)},
        },
        "a long model": lambda: {"model": "x" * 60_000_000},
    },
    "/v1/chat/completions": {
        "numbers as messages": lambda: {"messages": [1] * 130_000},
        "numbers as tools": lambda: {"messages": [TEXT], "tools": [1] * 130_000},
    },
    "/invocations": {
        "a long prompt for all routes": lambda: {"prompt": "a story " * 3_000_000},
        "numbers as messages for all routes": lambda: {"messages": [1] * 130_000},
        "a list for all routes": lambda: b"[1, 2]",
    },
    f"{INTERP}/tokenize": {
        "a prompt of a book": lambda: {"text": "a story " * 2_000_000},
        "a template of one's own": lambda: {
            "messages": [TEXT],
            "template_kwargs": {"chat_template": LOOPS},
        },
    },
    f"{INTERP}/capture": {
        "rows again and again": lambda: {
            "points": ["resid_post.1"],
            "rows": [0] * 500_000,
        },
        "points again and again": lambda: {"points": ["resid_post.1"] * 60_000},
    },
    f"{INTERP}/serves": {
        "unknown points": lambda: {"points": [f"z.{n}" for n in range(60_000)]},
    },
    f"{INTERP}/lens": {
        "layers again and again": lambda: {"lenses": [{"layers": [0] * 60_000}]},
        "lenses of everything": lambda: {
            "lenses": [{"layers": [0, 1, 2]}] * 8,
            "top_n": 100,
            **LONG,
        },
        "no end": lambda: {"lenses": [{"layers": [0]}], "max_tokens": 2**40},
    },
    f"{INTERP}/unembed_rows": {
        "tokens again and again": lambda: {"token_ids": [5] * 1_000_000},
    },
    f"{INTERP}/decode_residuals": {
        "many numbers of rows": lambda: {
            "residuals": zeros(2000, WIDTH),
            "top_k": 1280,
        },
        "many rows for the head": lambda: {"residuals": zeros(100_000, WIDTH)},
        "an empty tensor of great length": lambda: {
            "residuals": {"dtype": "float32", "shape": [2**40, 0], "data": ""}
        },
    },
    f"{INTERP}/project": {
        "many directions": lambda: directed(vectors=zeros(100_000, WIDTH)) | LONG,
        "a bias without a dimension": lambda: directed(vectors=[ONE], bias=zeros()),
    },
    f"{INTERP}/generate": {"a long seed": lambda: {"seed": 2**63}},
}
"""By route: what is wrong with a body, and the body or its fields beside those that the
route needs."""
NEEDED = {
    "/v1/completions": BASE,
    "/v1/chat/completions": {"model": "tiny", "max_tokens": 2},
    "/invocations": {"model": "tiny", "max_tokens": 2},
    **{
        f"{INTERP}/{name}": {"prompt_token_ids": [20, 30, 40]}
        for name in ("capture", "lens", "project", "generate")
    },
}
REFUSALS = (400, 404, 413, 422)
EVERYWHERE = {what: path for path, makers in ATTACKS.items() for what in makers}


def made(what: str) -> tuple[str, bytes]:
    """The route and the body of an attack."""
    path = EVERYWHERE[what]
    body = ATTACKS[path][what]()
    if isinstance(body, dict):
        body = json.dumps(NEEDED.get(path, {}) | body).encode()
    return path, body


@pytest.mark.parametrize("what", EVERYWHERE)
def test_it_is_refused_in_few_words(client: Client, what: str) -> None:
    reply = client.send("POST", *made(what))
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
    for what in EVERYWHERE:
        path, raw = made(what)
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
