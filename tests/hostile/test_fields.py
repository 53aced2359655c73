# SPDX-License-Identifier: Apache-2.0
"""A field that resembles ours, or belongs to another system, is never ignored."""

from typing import Any

import pytest

from tests.hostile.client import Client
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringRequest,
)
from vllm.entrypoints.generate.structured_decisions.protocol import (
    StructuredDecisionRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.utils.residual_fields import (
    FIELDS,
    FOREIGN,
    MOST_COMPARED,
    OBJECTS,
    refuse_args,
    refuse_unknown,
)
from vllm.exceptions import VLLMValidationError

CHAT = {"messages": [{"role": "user", "content": "x"}]}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": "x"}),
    (ChatCompletionRequest, CHAT),
]
GENERATING = [
    AnthropicMessagesRequest,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    GenerativeScoringRequest,
    ResponsesRequest,
    StructuredDecisionRequest,
]
MEANT = {
    "steering_vector": "did you mean steering_vectors?",
    "Steering_Vectors": "did you mean steering_vectors?",
    "captures": "did you mean capture?",
    "capture_waits": "did you mean capture_wait?",
    "captur": "did you mean capture?",
    "stering_name": "did you mean steering_name?",
    "redouts": "did you mean readouts?",
    "steering_names": "did you mean steering_name?",
    "STEERING_NAME": "did you mean steering_name?",
    "my_patches": "did you mean patch",
    "dispatches": "did you mean patch",
    "steering_scale": "did you mean steering",
    "vectors": "steering_vectors",
    "steering": "steering_vectors",
    "clamps": "steering_clamps",
    "conversation_id": "conversations",
    "capture_layers": "inline",
}
PEERS = (
    *("extra_args", "hidden_states", "control_vector", "sae_clamp_specs"),
    *("sae_full_reconstruction_specs", "controller", "intervene", "interventions"),
    *("hotwire", "cvec", "sae_features", "repe", "pyvene", "edits", "add_hook"),
    *("run_with_cache", "names_filter"),
)
"""Fields that other systems give a meaning to."""
TERMS = (
    *("logit_lens", "Ablations", "return_activations", "probe", "fwd_hooks"),
    *("residual", "intervention_type", "last_hidden_state"),
)
"""Fields with a term of interpretability."""


def unread(kind: Any) -> list[str]:
    """Names of the table that this kind of request does not support."""
    return [name for name in MEANT if name not in kind.model_fields]


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("value", [None, 1, {"post_block": {"0": [1.0]}}])
def test_a_field_that_is_not_supported_is_refused(
    kind: Any, body: dict[str, Any], value: Any
) -> None:
    for name in unread(kind):
        with pytest.raises(VLLMValidationError) as refused:
            kind.model_validate({"model": "m", **body, name: value})
        message = str(refused.value)
        assert name in message and MEANT[name] in message, message
        assert refused.value.parameter == name


@pytest.mark.parametrize("kind", GENERATING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [None, "x", {"a": 1}, [1]])
def test_no_request_ignores_a_field_of_another_system(kind: Any, value: Any) -> None:
    for name in (*PEERS, *TERMS):
        with pytest.raises(VLLMValidationError) as refused:
            kind.model_validate({"model": "m", name: value})
        assert refused.value.parameter == name
        assert "use " in str(refused.value) or name in TERMS, str(refused.value)
    for name in PEERS[1:]:
        keys = {"skip_reading_prefix_cache": 1, name: value}
        with pytest.raises(VLLMValidationError) as refused:
            kind.model_validate({"model": "m", "vllm_xargs": keys})
        assert refused.value.parameter == f"vllm_xargs.{name}"
        assert "use " in str(refused.value), str(refused.value)


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize(
    "ours",
    [
        {"capture": {"inline": {}}},
        {"steering_vectors": {"post_block": {"0": [1.0]}}},
        {"readouts": {"n": {"kind": "norm"}}},
    ],
)
def test_beside_a_field_of_ours_every_unknown_one_is_refused(
    kind: Any, body: dict[str, Any], ours: dict[str, Any]
) -> None:
    body = {"model": "m", **body, **ours}
    kind.model_validate({**body, "store": True, "metadata": {"a": "b"}, "top_k": 3})
    for name in ("colour", "positions", "layer", "x" * 1000):
        with pytest.raises(VLLMValidationError, match="no such field") as refused:
            kind.model_validate({**body, name: 1})
        assert refused.value.parameter == name[:60]
        assert len(str(refused.value)) < 300


def test_a_plugin_may_read_such_keys() -> None:
    refuse_args({"probe_threshold": 1.5, "lens": True}, "vllm_xargs")


@pytest.mark.parametrize(
    "name", sorted({*PEERS, "nnsight", "capture_layers", "steer"} - {"extra_args"})
)
def test_no_request_of_the_python_interface_does(name: str) -> None:
    known = {"output_residual_stream": [15], "skip_reading_prefix_cache": True}
    with pytest.raises(ValueError, match=name):
        refuse_args(SamplingParams(extra_args={**known, name: "x"}).extra_args)


@pytest.mark.parametrize(("kind", "body"), KINDS)
def test_other_extra_fields_pass_as_upstream_lets_them(
    kind: Any, body: dict[str, Any]
) -> None:
    others = {"colour": "blue", "store": True, "conversation": "c", "streaming": True}
    kind.model_validate({"model": "m", **body, **others, "string": "s"})


@pytest.mark.parametrize(("kind", "body"), KINDS)
@pytest.mark.parametrize("value", [True, ["inline"], "cheerful", 3.5])
def test_a_field_of_another_kind_is_answered_with_an_example(
    kind: Any, body: dict[str, Any], value: Any
) -> None:
    for name, example in OBJECTS.items():
        with pytest.raises(VLLMValidationError) as refused:
            kind.model_validate({"model": "m", **body, name: value})
        assert f"{name}: it must be an object, such as {example}" in str(refused.value)
        assert ("steering_name" in str(refused.value)) == (
            value == "cheerful" and "vectors" in name
        )


def test_what_is_implemented_is_not_called_foreign() -> None:
    for kind in (CompletionRequest, ChatCompletionRequest):
        # A key that is valid among the arguments is invalid at the top level.
        honoured = set(kind.model_fields) | set(FIELDS)
        assert not honoured & set(FOREIGN)


@pytest.mark.parametrize("name", ["capture_layers", "steer"])
@pytest.mark.parametrize("inside", ["vllm_xargs", "extra_args"])
def test_keys_for_extensions_are_looked_at_too(name: str, inside: str) -> None:
    body = {"model": "m", "prompt": "x", inside: {name: "[15]"}}
    with pytest.raises(VLLMValidationError, match=name) as refused:
        CompletionRequest.model_validate(body)
    assert refused.value.parameter == f"{inside}.{name}"


def test_a_field_that_stands_too_deep_is_refused() -> None:
    deep = {"vllm_xargs": {"capture": "x"}}
    with pytest.raises(VLLMValidationError, match="put it next to vllm_xargs"):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", **deep})
    for inside in ("extra_body", "sampling_params"):
        for name, said in (
            ("steering_vectors", "at the top level"),
            ("steering_vector", "did you mean steering_vectors"),
        ):
            body = {"model": "m", "prompt": "x", inside: {name: {}}}
            with pytest.raises(VLLMValidationError, match=said) as refused:
                CompletionRequest.model_validate(body)
            assert refused.value.parameter == f"{inside}.{name}"
    for params in ({"steered": []}, {"extra_args": {"capture_layers": []}}):
        body = {"token_ids": [1], "sampling_params": params}
        with pytest.raises(VLLMValidationError, match="sampling_params"):
            GenerateRequest.model_validate(body)


def test_a_long_name_is_cut() -> None:
    with pytest.raises(VLLMValidationError) as refused:
        body = {"model": "m", "prompt": "x", "steer" * 100_000: 1}
        CompletionRequest.model_validate(body)
    assert len(str(refused.value)) < 1000


@pytest.mark.e2e
@pytest.mark.slow
def test_a_server_says_it_once_and_plainly(client: Client) -> None:
    body = {"model": "tiny", "prompt": [20, 30], "max_tokens": 1}
    for path in ("/v1/completions", "/invocations"):
        refused = client.post(path, body | {"capture_waits": True})
        assert refused.status == 400, refused
        error = refused.body["error"]
        assert error["param"] == "capture_waits"
        assert error["message"].startswith("capture_waits: there is no such field")
        assert "validation error" not in error["message"]
    foreign = {"vllm_xargs": {"apply_steering_vectors": "[{}]"}}
    assert client.post("/v1/completions", body | foreign).status == 400
    assert client.post("/v1/completions", body | {"colour": 1}).status == 200


@pytest.mark.e2e
@pytest.mark.slow
def test_a_spec_without_its_consumer_is_refused_with_its_name(client: Client) -> None:
    body = {"model": "tiny", "prompt": [20, 30], "max_tokens": 1}
    spec = {"hooks": {"post_block": [0]}, "positions": "all"}
    refused = client.post("/v1/completions", body | {"capture": spec})
    assert refused.status == 400
    assert "consumer's name: {'filesystem': {'hooks': ...}}" in str(refused.body)
    nothing = client.post("/v1/completions", body | {"capture": {}})
    assert nothing.status == 200, "an empty capture asks for nothing"


def test_only_some_of_many_unknown_fields_are_compared_letter_by_letter() -> None:
    many = {f"a{number:06}": 1 for number in range(MOST_COMPARED)}
    before, after = {**many, "Captur": 1}, {**many, "captur": 1}
    with pytest.raises(VLLMValidationError, match="did you mean capture"):
        refuse_unknown(before, FIELDS)
    refuse_unknown(after, FIELDS)
