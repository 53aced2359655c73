# SPDX-License-Identifier: Apache-2.0
"""The routes of steering on an engine core with real tables, without a server."""

import base64
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.v1.steering._ranks import LAYERS, POINTS, WIDTH, Client, Core, frontend
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.steering import api_router, authority
from vllm.entrypoints.serve.utils import request_body
from vllm.entrypoints.serve.utils.json_reader import BodyLimits
from vllm.v1.steering.core.prefix_cache import EngineSteering
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend.admission import request_fields
from vllm.v1.steering.frontend.async_frontend import AsyncSteeringControl
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.frontend.frontend import NO_STEERING_FRONTEND
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack

KEYS = ["old", "new"]
ONE = [1.0, 2.0, -3.0, 4.0]
NORM = float(np.linalg.norm(ONE))
VECTORS = {"post_block": {"1": {"vector": ONE, "scale": -2}}}
POSTS = (
    *("set", "clear", "modules/register", "modules/unregister"),
    *("vectors/register", "vectors/unregister"),
)


def application(core: Core, keys: list[str], steers: bool = True) -> FastAPI:
    app = FastAPI()
    init_exception_handler(app)
    app.state.args = Namespace(log_error_stack=False)
    front = frontend() if steers else NO_STEERING_FRONTEND
    steering = AsyncSteeringControl(front, Engines(Client(core)))
    app.state.engine_client = Namespace(steering=steering)
    api_router.attach_router(app, Namespace(steering_api_key=keys))
    return app


@pytest.fixture
def core() -> Iterator[Core]:
    yield Core()
    EngineSteering.set(NO_STEERING)


@pytest.fixture
def client(core: Core) -> TestClient:
    return TestClient(application(core, KEYS), raise_server_exceptions=False)


def post(client: TestClient, what: str, body: Any, key: str = "new") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return client.post(f"/v1/steering/{what}", json=body, headers=headers)


def test_an_answer_says_what_was_applied(client: TestClient) -> None:
    clamp = {"vector": ONE, "op": "clamp", "max": 1, "strength": 0.5, "positions": [7]}
    body = {
        "vectors": VECTORS,
        "decode_vectors": {"pre_attn": {"0": [clamp, {"vector": ONE}]}},
    }
    told = post(client, "set", body)
    assert told.status_code == 200, told.text
    plain = {"op": "add", "min": None, "max": None, "norm_match": False}
    plain |= {"norm": pytest.approx(NORM), "positions": None}
    base = {"tier": "vectors", "hook": "post_block", "layer": 1, "scale": -2}
    decode = {"tier": "decode_vectors", "hook": "pre_attn", "layer": 0, "scale": 1}
    assert told.json()["applied"] == [
        plain | base,
        plain | decode | {"op": "clamp", "max": 1, "strength": 0.5, "positions": [7]},
        plain | decode,
    ]
    state = client.get("/v1/steering").json()
    extra = {"applied", "status", "hook_points", "layers_updated"}
    active = {
        "1": {"post_block": {"norm": pytest.approx(2 * NORM)}},
        "0": {"pre_attn": {"decode_norm": pytest.approx(NORM)}},
    }
    same = {k: v for k, v in told.json().items() if k not in extra}
    assert state == same and state["active_layers"] == active
    assert told.json()["status"] == "ok"
    assert told.json()["hook_points"] == ["post_block", "pre_attn"]
    assert told.json()["layers_updated"] == [0, 1]
    norms = state["vectors"]["post_block"]["1"]
    assert norms == {"norm": pytest.approx(2 * NORM)}
    counts = ("configs_in_use", "max_configs", "rows_in_use", "max_rows")
    assert [state[name] for name in counts] == [0, 2, 2, 6]
    cleared = post(client, "clear", {}).json()
    assert cleared["rows_in_use"] == 0 and cleared["active_layers"] == {}


def test_a_module_says_what_was_registered(client: TestClient) -> None:
    told = post(client, "modules/register", {"name": "calm", "vectors": VECTORS})
    assert told.status_code == 200, told.text
    assert told.json()["applied"][0]["scale"] == -2
    modules = client.get("/v1/steering/modules").json()["modules"]
    assert list(modules) == ["calm"]
    again = post(client, "modules/register", {"name": "calm", "vectors": VECTORS})
    assert again.status_code == 400 and "unregister it first" in again.text
    body = {"name": "calm", "vectors": VECTORS, "replace": True}
    assert post(client, "modules/register", body).status_code == 200
    assert post(client, "modules/unregister", {"name": "calm"}).status_code == 200
    gone = post(client, "modules/unregister", {"name": "calm"})
    assert gone.status_code == 404 and "calm" in gone.text


def test_vectors_of_gates_are_registered_by_kind(client: TestClient) -> None:
    rows = np.array([ONE], dtype=np.float32)
    packed = {"dtype": "float32", "shape": [1, 4], "layer_indices": [1]}
    packed |= {"data": base64.b64encode(rows.tobytes()).decode()}
    body = {"name": "calm", "kind": "steer", "packed": {"post_block": packed}}
    names = {"probe": [], "steer": ["calm"]}
    told = {"status": "ok", "name": "calm", "kind": "steer", "vectors": names}
    for _ in range(2):  # A name that is there is replaced.
        registered = post(client, "vectors/register", body)
        assert registered.status_code == 200 and registered.json() == told
    found = client.get("/v1/steering/vectors").json()
    assert found == {"vectors": names, "count": 1}
    short = body | {"packed": {"post_block": packed | {"shape": [1, 3]}}}
    for bad in (body | {"kind": "clamp"}, body | {"name": ""}, short):
        assert post(client, "vectors/register", bad).status_code == 400
    assert post(client, "vectors/register", body, key="no").status_code == 401
    gone = {"name": "calm", "kind": "steer"}
    assert post(client, "vectors/unregister", gone).status_code == 200
    assert post(client, "vectors/unregister", gone).status_code == 404


def test_every_layer_of_every_rank_is_listed(client: TestClient) -> None:
    told = client.get("/v1/steering/layers").json()
    assert told["layers"] == {str(layer): list(POINTS) for layer in range(LAYERS)}
    assert told["hidden_size"] == WIDTH


@pytest.mark.parametrize("faulty", range(3))
@pytest.mark.parametrize("what", ["set", "clear"])
def test_a_change_that_fails_on_one_rank_changes_none(
    core: Core, client: TestClient, faulty: int, what: str
) -> None:
    assert post(client, "set", {"vectors": VECTORS}).status_code == 200
    before, state = core.content(), client.get("/v1/steering").json()
    core.ranks[faulty].fails = True
    body = {"prefill_vectors": {"pre_attn": {"0": ONE, "1": ONE}}}
    failed = post(client, what, body if what == "set" else {})
    assert failed.status_code == 500
    assert "no rank has changed" in failed.text and "rank 1" in failed.text
    assert core.content() == before
    assert client.get("/v1/steering").json() == state
    core.ranks[faulty].fails = False
    assert post(client, "set", body).status_code == 200
    assert core.content() != before


class Unread:
    """A body that must not be read."""

    async def stream(self) -> Any:
        raise AssertionError("the body was read before the key was checked")
        yield b""


@pytest.mark.parametrize("what", POSTS)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic new", "new"]
)
def test_without_a_key_the_body_is_not_read(
    client: TestClient, what: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    with patch("starlette.requests.Request.stream", Unread.stream):
        url = f"/v1/steering/{what}"
        refused = client.post(url, content=b"x" * 100, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_keys_old_and_new_are_accepted_while_they_are_rotated(
    client: TestClient, key: str
) -> None:
    assert post(client, "set", {"vectors": VECTORS}, key).status_code == 200


def test_all_keys_are_compared_in_constant_time() -> None:
    keys = authority.steering_keys(Namespace(steering_api_key=["a", "b" * 90, "ö"]))
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    with patch("secrets.compare_digest", compare):
        assert authority.may_change(keys, "Bearer a")
    assert len(compared) == 4, "a match must not end the search"
    assert {len(key) for pair in compared for key in pair} == {32}


def test_a_large_body_is_refused_before_it_is_all_there(client: TestClient) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b" " * 1000

    headers = {"Authorization": "Bearer new"}
    with patch.object(request_body, "LIMITS", BodyLimits(num_bytes=5000)):
        url = "/v1/steering/set"
        refused = client.post(url, content=chunks(), headers=headers)
        fits = post(client, "set", {"vectors": VECTORS})
    assert refused.status_code == 413 and "5000" in refused.text
    assert fits.status_code == 200


SOME_LAYERS = {"pre_attn": {"0": ONE, "7": ONE}}
"""Of which the model has one."""

BAD: list[tuple[str, Any, str]] = [
    ("set", {}, "at least one of"),
    ("set", [], "JSON object"),
    ("set", {"vector": ONE}, "no such field"),
    ("set", {"vectors": VECTORS, "replace": "yes"}, "true or false"),
    ("set", {"vectors": VECTORS, "decode_vectors": SOME_LAYERS}, "no layer 7"),
    ("clear", {"vectors": VECTORS}, "no such field"),
    ("modules/register", {"name": "x"}, "at least one"),
    ("modules/register", {"name": " x ", "vectors": VECTORS}, "blanks"),
    ("modules/register", {"name": "x" * 129, "vectors": VECTORS}, "128"),
    ("modules/register", {"name": 7, "vectors": VECTORS}, "printable"),
    ("modules/register", {"vectors": VECTORS}, "name"),
    ("modules/unregister", {}, "name"),
    ("modules/unregister", {"name": 3}, "name"),
]


@pytest.mark.parametrize(("what", "body", "said"), BAD, ids=range(len(BAD)))
def test_bad_bodies_change_nothing_and_say_why(
    core: Core, client: TestClient, what: str, body: Any, said: str
) -> None:
    before = core.content()
    refused = post(client, what, body)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]
    assert core.content() == before
    assert client.get("/v1/steering/modules").json()["modules"] == {}


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b'{"vectors": NaN}'])
def test_what_is_not_json_is_refused(client: TestClient, text: bytes) -> None:
    headers = {"Authorization": "Bearer new"}
    refused = client.post("/v1/steering/set", content=text, headers=headers)
    assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("", None),
        ("/layers", None),
        ("/modules", None),
        ("/set", {"vectors": VECTORS}),
        ("/clear", {}),
        ("/modules/register", {"name": "x", "vectors": VECTORS}),
        ("/modules/unregister", {"name": "x"}),
    ],
)
def test_a_server_that_does_not_steer_says_how_to(what: str, body: Any) -> None:
    client = TestClient(application(Core(), KEYS, steers=False))
    if body is None:
        told = client.get(f"/v1/steering{what}")
    else:
        told = post(client, what[1:], body)
    assert told.status_code == 400 and "--enable-steering" in told.text


@pytest.mark.parametrize(("mode", "status"), [(False, 404), (True, 200)])
def test_without_keys_changes_need_the_development_mode(
    core: Core, mode: bool, status: int
) -> None:
    with patch.object(api_router.envs, "VLLM_SERVER_DEV_MODE", mode, create=True):
        client = TestClient(application(core, []))
    told = client.post("/v1/steering/set", content=json.dumps({"vectors": VECTORS}))
    assert told.status_code == status, told.text
    assert client.get("/v1/steering").status_code == 200


SAID = {
    "layer_convention": "0-based block index",
    "model": "org/tiny",
    "architecture": "TinyForCausalLM",
    "model_type": "tiny",
    "weights": "abc",
    "hidden_size": WIDTH,
    "num_layers": LAYERS,
    "origin": "mean of 3 pairs",
    "norms": {"post_block.1": NORM, "decode.pre_attn.0": NORM},
}


def register(client: TestClient, **metadata: Any) -> httpx.Response:
    body = {"name": "calm", "vectors": VECTORS, "metadata": {**SAID, **metadata}}
    body["decode_vectors"] = {"pre_attn": {"0": ONE}}
    return post(client, "modules/register", body)


def test_a_module_keeps_where_it_comes_from(client: TestClient) -> None:
    told = register(client)
    assert told.status_code == 200, told.text
    kept = client.get("/v1/steering/modules").json()["modules"]["calm"]["metadata"]
    assert kept == told.json()["metadata"] == {**SAID, "norms": close(SAID["norms"])}


def close(norms: Any) -> Any:
    return pytest.approx(norms, rel=1e-6)


def test_a_module_that_says_nothing_gets_its_norms(client: TestClient) -> None:
    told = post(client, "modules/register", {"name": "calm", "vectors": VECTORS})
    assert told.json()["metadata"] == {
        "layer_convention": SAID["layer_convention"],
        "norms": close({"post_block.1": NORM}),
    }


UNFIT: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_size": 8}, "hidden_size", "vectors of 8 numbers.*has 4; extract"),
    ({"weights": "def"}, "weights", "other weights.*omit model and weights"),
    ({"layer_convention": "1-based"}, "layer_convention", "counts layers as '1-based'"),
    ({"norms": {"post_block.0": 9}}, "norms", "it is missing"),
    ({"norms": [1]}, "norms", "object of numbers"),
    ({"hidden_size": "wide"}, "hidden_size", "a count"),
    ({"origin": 7}, "origin", "text"),
    ({"wieghts": "abc"}, "wieghts", "no such entry; the entries are"),
]


@pytest.mark.parametrize(("metadata", "entry", "said"), UNFIT, ids=range(len(UNFIT)))
def test_a_module_of_another_model_is_refused(
    client: TestClient, metadata: dict[str, Any], entry: str, said: str
) -> None:
    refused = register(client, **metadata)
    error = refused.json()["error"]
    assert refused.status_code == 400, refused.text
    assert error["param"] == f"metadata.{entry}"
    assert re.search(said, error["message"])
    assert client.get("/v1/steering/modules").json()["modules"] == {}


def test_metadata_must_be_an_object(client: TestClient) -> None:
    body = {"name": "calm", "vectors": VECTORS, "metadata": "org/tiny"}
    refused = post(client, "modules/register", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "metadata"


HUGE = {"post_block": {"1": [2e38] * WIDTH}}
"""Twice this value overflows float32."""


def test_a_set_that_leaves_no_room_for_a_request_changes_nothing(
    core: Core, client: TestClient
) -> None:
    own = pack({(1, "post_block"): np.full(WIDTH, 2e38, np.float32)})
    params = Namespace(_steering=SteeringTiers(decode=own))
    running = Namespace(sampling_params=params, num_computed_tokens=0)
    core.scheduler.requests["running"] = running
    before, state = core.content(), client.get("/v1/steering").json()
    for body in ({"vectors": HUGE}, {"decode_vectors": HUGE, "replace": True}):
        refused = post(client, "set", body)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == "vectors"
        assert "a request in flight" in error["message"]
        assert "decode tokens at post_block of layer 1" in error["message"]
        assert core.content() == before
        assert client.get("/v1/steering").json() == state
    assert core.scheduler.requests == {"running": running}
    del core.scheduler.requests["running"]
    assert post(client, "set", {"vectors": HUGE}).status_code == 200


def test_a_set_that_overflows_with_what_is_set_changes_nothing(
    core: Core, client: TestClient
) -> None:
    assert post(client, "set", {"vectors": HUGE}).status_code == 200
    before = core.content()
    refused = post(client, "set", {"prefill_vectors": HUGE})
    assert refused.status_code == 400, refused.text
    assert "prefill tokens at post_block of layer 1" in refused.text
    assert core.content() == before
    assert post(client, "set", {"decode_vectors": VECTORS}).status_code == 200


def test_a_request_is_checked_against_what_is_set_now(
    core: Core, client: TestClient
) -> None:
    engine_client: Any = client.app.state.engine_client  # type: ignore[attr-defined]
    frontend = engine_client.steering.frontend

    def admitted() -> bool:
        fields = dict.fromkeys(request_fields()) | {"prefill_steering_vectors": HUGE}
        params: Any = Namespace(
            max_tokens=4,
            _steering=None,
            conversation_id=None,
            steering_receipt=False,
            **fields,
        )
        try:
            frontend.admit(params, 5)
        except SteeringValidationError as error:
            assert "with the engine's vectors, what is added to prefill" in str(error)
            assert error.parameter == "prefill_steering_vectors"
            assert params._steering is None
            return False
        return True

    assert admitted()
    assert post(client, "set", {"decode_vectors": HUGE}).status_code == 200
    assert admitted(), "prompt tokens are not steered by it"
    core.ranks[1].fails = True
    assert post(client, "set", {"vectors": HUGE, "replace": True}).status_code == 500
    assert admitted(), "no rank has changed"
    core.ranks[1].fails = False
    assert post(client, "set", {"vectors": HUGE, "replace": True}).status_code == 200
    assert not admitted()
    assert post(client, "clear", {}).status_code == 200
    assert admitted()
