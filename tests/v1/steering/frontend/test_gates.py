# SPDX-License-Identifier: Apache-2.0
"""The field `steering`: gates of an earlier fork become entries with `when`."""

import base64
from typing import Any

import numpy as np
import pytest

from tests.v1.steering.frontend.test_admission import admission, admit
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.steering.errors import SteeringValidationError, UnknownModuleError
from vllm.v1.steering.plan import SteeringTiers

PROBE, STEER = np.array([1.0, 0, 0, 0]), np.array([0.0, 1.0, 2.0, -1.0])


def packed(vector: Any, hook: str = "post_attn", layer: int = 0) -> dict[str, Any]:
    rows = np.atleast_2d(np.asarray(vector, dtype=np.float32))
    return {
        hook: {
            "dtype": "float32",
            "shape": list(rows.shape),
            "layer_indices": [layer] * len(rows),
            "data": base64.b64encode(rows.tobytes()).decode(),
        }
    }


def inline(vector: Any, **at: Any) -> dict[str, Any]:
    return {"kind": "inline", "packed": packed(vector, **at)}


def named(name: str) -> dict[str, Any]:
    return {"kind": "name", "name": name}


ALWAYS: dict[str, Any] = {"kind": "always"}
WHEN: dict[str, Any] = {"kind": "probe", "probe": inline(PROBE), "threshold": 0.5}
ADD: dict[str, Any] = {"kind": "add", "steer": inline(STEER, layer=1), "strength": 3.0}


def gate(when: Any = WHEN, scope: str = "this_token", apply: Any = ADD) -> Any:
    return {"when": when, "scope": scope, "apply": apply}


def added(tiers: SteeringTiers) -> dict[tuple[int, str], list[float]]:
    assert tiers.decode is not None and tiers.base is None and tiers.prefill is None
    return {tap: vector.tolist() for tap, vector in tiers.decode.unpack().items()}


def test_what_always_adds_is_a_vector_of_generated_tokens() -> None:
    tiers = admit(admission(), steering=[gate(ALWAYS, "rest_of_request")])
    assert added(tiers) == {(1, "post_attn"): (3 * STEER).tolist()}
    assert not tiers.decode_operations


@pytest.mark.parametrize(
    ("scope", "ours", "sharpness"),
    [("this_token", "token", 2.0), ("rest_of_request", "rest", 0.0)],
)
def test_a_probe_becomes_a_condition(scope: str, ours: str, sharpness: float) -> None:
    when = WHEN | {"sharpness": 2.0}
    tiers = admit(admission(), steering=[gate(when, scope)])
    (operation,) = tiers.decode_operations
    condition = operation.details.when
    assert condition is not None and condition.tap == (0, "post_attn")
    assert condition.vector.tolist() == PROBE.tolist()
    assert (condition.above, condition.threshold) == (True, 0.5)
    assert (condition.scope, condition.sharpness) == (ours, sharpness)
    assert (operation.layer, operation.hook) == (1, "post_attn")


def test_attenuation_takes_off_a_part_of_what_the_request_adds() -> None:
    attenuate = {"kind": "attenuate", "strength": 0.25}
    own = {"post_attn": {1: [4.0, 0.0, 0.0, 8.0]}}
    given = {"decode_steering_vectors": own}
    gates = [gate(ALWAYS, "rest_of_request", attenuate)]
    tiers = admit(admission(), **given, steering=gates)
    assert added(tiers) == {(1, "post_attn"): [1.0, 0.0, 0.0, 2.0]}
    gates = [gate(WHEN, "rest_of_request", attenuate)]
    tiers = admit(admission(), **given, steering=gates)
    assert added(tiers) == {(1, "post_attn"): [4.0, 0.0, 0.0, 8.0]}
    (operation,) = tiers.decode_operations
    assert operation.details.when is not None


def test_names_are_those_of_their_kind() -> None:
    made = admission()
    made.gate_vectors.register("calm", "steer", packed(STEER, layer=1))
    made.gate_vectors.register("anger", "probe", packed(PROBE))
    assert made.gate_vectors.names() == {"probe": ["anger"], "steer": ["calm"]}
    by_name = gate(
        WHEN | {"probe": named("anger")}, apply=ADD | {"steer": named("calm")}
    )
    assert admit(made, steering=[by_name]) == admit(made, steering=[gate()])
    with pytest.raises(SteeringValidationError, match="no steer vector is named"):
        admit(made, steering=[gate(apply=ADD | {"steer": named("anger")})])
    made.gate_vectors.unregister("calm", "steer")
    with pytest.raises(UnknownModuleError):
        made.gate_vectors.unregister("calm", "steer")
    with pytest.raises(SteeringValidationError, match="name must be"):
        made.gate_vectors.unregister(None, "steer")
    for bad in (packed([PROBE, STEER]), packed([1.0, 2.0]), {}):
        with pytest.raises(SteeringValidationError):
            made.gate_vectors.register("two", "probe", bad)


def test_a_conversation_keeps_what_stays() -> None:
    made = admission()
    made.gate_vectors.register("calm", "steer", packed(STEER, layer=1))
    stays = gate(ALWAYS, "rest_of_conversation", ADD | {"steer": named("calm")})
    first = admit(made, steering=[stays], conversation_id="a")
    assert admit(made, conversation_id="a") == first
    assert admit(made, steering=[stays], conversation_id="a") == first
    assert admit(made, conversation_id="b") is None
    made.gate_vectors.unregister("calm", "steer")
    with pytest.raises(SteeringValidationError, match=r"kept for the conversation"):
        admit(made, conversation_id="a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "must list 1 to 16"),
        ([], "must list 1 to 16"),
        ([{"when": ALWAYS}], "an object with the keys"),
        ([gate(scope="for_ever")], "scope must be one of"),
        ([gate({"kind": "never"})], 'must be "always" or "probe"'),
        ([gate(WHEN | {"threshold": float("nan")})], "finite number"),
        ([gate(WHEN | {"sharpness": -1.0})], "must not be negative"),
        ([gate(WHEN | {"probe": inline([PROBE, STEER])})], "one vector for each"),
        ([gate(WHEN, "next_step")], "next one alone"),
        ([gate(WHEN, "rest_of_conversation")], "must be registered"),
        ([gate(ALWAYS, "rest_of_conversation")], "must be registered"),
        ([gate(apply={"kind": "clamp"})], "clamps are entries"),
        ([gate(apply={"kind": "attenuate", "strength": 0.5})], "its own token"),
        ([gate(apply=ADD | {"steer": {"kind": "inline", "packed": {}}})], "must map"),
        ([gate(apply=ADD | {"steer": inline([1.0])})], "has the shape"),
        ([gate(WHEN | {"probe": inline(PROBE, layer=1, hook="post_block")})], "probe"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(SteeringValidationError, match=message):
        admit(admission(), steering=bad)


def test_requests_over_http_carry_gates() -> None:
    fields: dict[str, Any] = {"steering": [gate()], "conversation_id": "a"}
    completion = CompletionRequest(prompt="x", **fields)
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **fields)
    for request in (completion, chat):
        params = request.to_sampling_params(4, {})
        assert (params.steering, params.conversation_id) == ([gate()], "a")
