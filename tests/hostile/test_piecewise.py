# SPDX-License-Identifier: Apache-2.0
"""Long parts of a request are validated in pieces that end with the first bad one."""

import asyncio
from typing import Any

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.piecewise import check_in_pieces

MESSAGE = {"role": "user", "content": "a story"}


def errors_of(model: Any, **body: Any) -> list[Any]:
    return asyncio.run(check_in_pieces(model, body))


@pytest.mark.parametrize(
    "messages",
    [
        [1] * 5000,
        [{}] * 5000,
        [MESSAGE] * 500 + [{"role": "user", "content": 5}] * 5000,
        [MESSAGE | {"content": [1] * 5000}],
    ],
    ids=["numbers", "empty", "bad after good", "parts"],
)
def test_errors_of_one_piece_are_found(messages: list[Any]) -> None:
    errors = errors_of(ChatCompletionRequest, messages=messages)
    assert 0 < len(errors) < 2000
    assert errors[0]["loc"][0] == "messages"


def test_an_error_names_its_place_in_the_whole_list() -> None:
    messages = [MESSAGE] * 500 + [{"role": "user", "content": 5}]
    errors = errors_of(ChatCompletionRequest, messages=messages)
    assert {error["loc"][1] for error in errors} == {500}


def test_types_that_may_not_be_mixed_are_seen_at_once() -> None:
    errors = errors_of(CompletionRequest, prompt=[1] * 5000 + ["x"] * 5000)
    assert 0 < len(errors) < 20


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_values_of_a_wrong_type_are_found(field: str) -> None:
    wrong = ["x"] * 5000 if field == "stop_token_ids" else dict.fromkeys(range(5000))
    errors = errors_of(CompletionRequest, prompt="a", **{field: wrong})
    assert errors and {error["loc"][0] for error in errors} == {field}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [MESSAGE] * 3000},
        {"messages": [MESSAGE | {"content": [{"type": "text", "text": "x"}] * 3000}]},
        {"messages": [MESSAGE, {"role": "assistant", "tool_calls": []}] * 100},
        {"messages": [MESSAGE], "stop_token_ids": [1] * 9000},
        {"messages": [MESSAGE], "logit_bias": {str(n): 1 for n in range(3000)}},
    ],
    ids=["messages", "parts", "roles", "token ids", "bias"],
)
def test_what_is_right_passes(body: dict[str, Any]) -> None:
    assert errors_of(ChatCompletionRequest, **body) == []
    ChatCompletionRequest.model_validate(body | {"model": "tiny"})


def test_many_fields_are_refused() -> None:
    errors = errors_of(CompletionRequest, **{f"a{n}": 1 for n in range(2000)})
    assert "2000 fields" in errors[0]["msg"]
