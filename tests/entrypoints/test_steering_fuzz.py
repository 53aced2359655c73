# SPDX-License-Identifier: Apache-2.0
"""Steering routes give no server error and no partial change for any body."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from tests.entrypoints.test_steering_routes import VECTORS, application, post
from tests.hostile.mutations import places, put
from tests.v1.steering._ranks import Core
from vllm.v1.steering.core.prefix_cache import EngineSteering
from vllm.v1.steering.plan import NO_STEERING
from vllm.v1.steering.spec.entry import KEYS

HEADERS = {"Authorization": "Bearer new"}
core = Core()
app = application(core, ["new"])


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    yield
    EngineSteering.set(NO_STEERING)


def state() -> tuple[Any, Any, list[bytes]]:
    client = TestClient(app)
    told = [client.get(f"/v1/steering{what}").json() for what in ("", "/modules")]
    return told[0], told[1], core.content()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, -(10**25), "1", "vector", "post_block"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(
                [*KEYS, "pre_attn", "post_block", "0", "1", "last", "data", "shape"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


ENTRY = {"vector": [1.0, 2.0, 3.0, 4.0], "op": "clamp", "min": 0, "positions": [0, -1]}
PACKED = {
    "dtype": "float32",
    "shape": [1, 4],
    "layer_indices": [0],
    "data": "AACAPwAAgD8AAIA/AACAPw==",
    "scales": [2.0],
}
RIGHT: dict[str, Any] = {
    "vectors": VECTORS,
    "prefill_vectors": {"pre_attn": PACKED},
    "decode_vectors": {"post_attn": {"0": [ENTRY, {"vector": [1, 2, 3, 4]}]}},
    "replace": True,
}
PLACES = list(places(RIGHT))


@given(where=st.sampled_from(PLACES), other=JSON)
def test_a_body_with_one_place_spoilt_is_refused_or_carried_out(
    where: tuple[Any, ...], other: Any
) -> None:
    body = put(RIGHT, where, other)
    client = TestClient(app, raise_server_exceptions=False)
    before = state()
    text = json.dumps(body)
    answer = client.post("/v1/steering/set", content=text, headers=HEADERS)
    assert answer.status_code in (200, 400), (text, answer.text)
    if answer.status_code == 400:
        assert state() == before
    else:
        assert answer.json()["applied"]
        assert post(client, "clear", {}).status_code == 200
