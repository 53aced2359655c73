# SPDX-License-Identifier: Apache-2.0
"""Forms of an earlier fork: gates become entries with `when`, and clamps operations."""

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.v1.steering._ranks import Client, Core, control
from tests.v1.steering.frontend.test_admission import admission, admit
from tests.v1.steering.spec import test_sources
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.interop.reference_fork import named as gate_vectors
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.steering.errors import SteeringValidationError, UnknownModuleError
from vllm.v1.steering.frontend.admission import request_fields
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
    one, other = (control(client, several=True) for client in [Client(Core())] * 2)
    run = asyncio.run
    run(gate_vectors.register(one, "calm", "steer", packed(STEER, layer=1)))
    names = run(gate_vectors.register(other, "anger", "probe", packed(PROBE)))
    assert names == {"probe": ["anger"], "steer": ["calm"]}
    by_name = gate(
        WHEN | {"probe": named("anger")}, apply=ADD | {"steer": named("calm")}
    )
    for server in (one, other):
        assert run(gate_vectors.names(server)) == names
        made: Any = server.frontend
        expected = admit(made.admission, steering=[gate()])
        assert admit(made.admission, steering=[by_name]) == expected
        with pytest.raises(SteeringValidationError, match="no steer vector is named"):
            wrong = gate(apply=ADD | {"steer": named("anger")})
            admit(made.admission, steering=[wrong])
    run(gate_vectors.unregister(one, "calm", "steer"))
    with pytest.raises(UnknownModuleError):
        run(gate_vectors.unregister(other, "calm", "steer"))
    with pytest.raises(SteeringValidationError, match="name must be"):
        run(gate_vectors.unregister(one, None, "steer"))
    other_op = packed(PROBE)
    other_op["post_attn"]["op"] = "project_out"
    for bad in (packed([PROBE, STEER]), packed([1.0, 2.0]), {}, other_op):
        with pytest.raises(SteeringValidationError) as refused:
            run(gate_vectors.register(one, "two", "probe", bad))
        assert refused.value.parameter.startswith("packed")


def test_a_conversation_keeps_what_stays() -> None:
    server = control(Client(Core()))
    made: Any = server.frontend
    run, name = asyncio.run, ("calm", "steer")
    run(gate_vectors.register(server, *name, packed(STEER, layer=1)))
    stays = gate(ALWAYS, "rest_of_conversation", ADD | {"steer": named("calm")})
    refused = {"steering_vectors": {"post_attn": {0: [3e38] * 4, 1: [3e38] * 4}}}
    with pytest.raises(SteeringValidationError, match="finite"):
        always = gate(ALWAYS, apply=ADD | {"steer": inline([3e38] * 4, layer=1)})
        admit(made.admission, **refused, steering=[stays, always], conversation_id="a")
    assert admit(made.admission, conversation_id="a") is None, "it was refused"
    first = admit(made.admission, steering=[stays], conversation_id="a")
    assert admit(made.admission, conversation_id="a") == first
    assert admit(made.admission, steering=[stays], conversation_id="a") == first
    assert admit(made.admission, conversation_id="b") is None
    run(gate_vectors.unregister(server, *name))
    with pytest.raises(SteeringValidationError, match=r"kept for the conversation"):
        admit(made.admission, conversation_id="a")


def test_named_vectors_of_generated_tokens_act_there() -> None:
    vector = {"vector": STEER.tolist(), "positions": "all_generated"}
    tiers = admit(admission(), steering=[gate(ALWAYS, "rest_of_request")])
    entry = {"post_attn": {1: [vector, {**vector, "scale": 2}]}}
    assert added(admit(admission(), steering_vectors=entry)) == added(tiers)


def test_clamps_of_a_request_come_after_its_entries() -> None:
    clamp = {"vector": PROBE.tolist(), "max": 1.0}
    entry = {"post_attn": {0: [{**clamp, "max": 2.0, "op": "clamp"}]}}
    clamps = {"post_attn": {0: [clamp]}}
    tiers = admit(admission(), steering_vectors=entry, steering_clamps=clamps)
    assert tiers.base is not None
    assert [one.high for one in tiers.base.operations] == [2.0, 1.0]


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


def patch(**keys: Any) -> dict[str, Any]:
    place = {"layer": 1, "hook": "post_attn", "dest_position": 2}
    return {key: one for key, one in {**place, **keys}.items() if one is not None}


INLINE = {"patch_vectors": packed([STEER, PROBE], layer=0)["post_attn"]}
del INLINE["patch_vectors"]["layer_indices"]


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ({"source_run": "clean", "source_position": 4}, test_sources.ROWS[3].tolist()),
        ({"source_module": "zeros"}, [0.0] * 4),
        ({"source_module": "tone"}, test_sources.ONE),
        ({"source_inline": 1}, PROBE.tolist()),
    ],
)
def test_a_patch_replaces_a_row(source: Any, row: list[float]) -> None:
    made = test_sources.admission()
    fields = INLINE if "source_inline" in source else {}
    tiers = admit(made, patch=[patch(**source)], **fields)
    (one,) = tiers.base.operations
    assert (one.op, one.tap, one.positions) == ("replace", (1, "post_attn"), ((2, 3),))
    assert one.vector.tolist() == row
    own = {"op": "replace", "positions": [2], "vector": row}
    same = admit(made, steering_vectors={"post_attn": {1: own}})
    assert same.digest == tiers.digest


def test_patches_have_weights_and_stand_beside_vectors() -> None:
    both = [
        patch(source_module="zeros", alpha=0.25, mask={"indices": [0]}),
        patch(source_inline=0, dest_position=3, mask={"inline": 1}, hook="pre_attn"),
    ]
    entry = {"pre_attn": {0: STEER}}
    tiers = admit(
        test_sources.admission(), patch=both, steering_vectors=entry, **INLINE
    )
    assert tiers.base is not None and (0, "pre_attn") in tiers.base.unpack()
    by_tap = {one.tap: one for one in tiers.base.operations}
    assert by_tap[1, "post_attn"].details.alpha == 0.25
    mask = by_tap[1, "pre_attn"].details.array("mask")
    assert mask is not None and mask.tolist() == PROBE.tolist()


def test_large_patches_are_parsed_before_admission() -> None:
    made = test_sources.admission()
    params: Any = SimpleNamespace(**dict.fromkeys(request_fields()))
    params.patch = [patch(source_inline=0)]
    params.patch_vectors = INLINE["patch_vectors"]
    prepared = made.prepared(params)
    tiers = admit(made, patch=prepared.patch, patch_vectors=prepared.patch_vectors)
    assert tiers.digest == admit(made, patch=params.patch, **INLINE).digest


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "must list 1 to"),
        ({}, "must list 1 to"),
        ([3], "an object with the keys"),
        ([patch(layer=None)], "missing: ..layer"),
        ([patch(source_module="zeros", strength=1)], "unknown: ..strength"),
        ([patch()], "give one of"),
        ([patch(source_module="zeros", source_run="clean")], "give one of"),
        ([patch(source_run="clean")], "source_run needs it"),
        ([patch(source_module="zeros", source_position=0)], "no other source"),
        ([patch(source_run="clean", source_position=-1)], "index from 0"),
        ([patch(source_run="gone", source_position=0)], "no run is kept"),
        ([patch(source_module="zeros", dest_position=-1)], "index from 0"),
        ([patch(source_module="zeros", dest_position=99)], "no token is at 99"),
        ([patch(source_module="zeros", layer="1")], "index from 0"),
        ([patch(source_module="zeros", layer=7)], "no layer 7"),
        ([patch(source_module="zeros", hook=3)], "must be a name"),
        ([patch(source_module="zeros", hook="mlp")], "not a hook point"),
        ([patch(source_inline=0)], "no row of patch_vectors"),
        ([patch(source_module="zeros", mask={"inline": 0})], "no row of"),
        ([patch(source_module="zeros", mask=[0])], "must be"),
        ([patch(source_module="zeros", alpha="x")], "finite number"),
    ],
    ids=str,
)
def test_patches_that_cannot_be_are_refused(bad: Any, message: str) -> None:
    errors = SteeringValidationError, CaptureValidationError
    with pytest.raises(errors, match=message):
        admit(test_sources.admission(), patch=bad)


def test_a_position_beyond_the_prompt_is_that_of_the_patch() -> None:
    bad, own = (
        [patch(source_module="zeros", dest_position=99)],
        {"pre_attn": {0: STEER}},
    )
    for fields in ({}, {"steering_vectors": own}, {"prefill_steering_vectors": own}):
        with pytest.raises(SteeringValidationError) as refused:
            admit(test_sources.admission(), patch=bad, **fields)
        assert refused.value.parameter == "patch.post_attn.1.positions"
        assert refused.value.value == "99"


def test_rows_without_patches_are_refused() -> None:
    with pytest.raises(SteeringValidationError, match="must list 1 to"):
        admit(test_sources.admission(), **INLINE)
    with pytest.raises(SteeringValidationError, match="no row of patch_vectors"):
        admit(test_sources.admission(), patch=[patch(source_inline=2)], **INLINE)
    for bad in ({}, {"data": ""}, 3, INLINE["patch_vectors"] | {"x": 1}):
        with pytest.raises(SteeringValidationError, match="must be rows"):
            admit(
                test_sources.admission(),
                patch=[patch(source_inline=0)],
                patch_vectors=bad,
            )
