# SPDX-License-Identifier: Apache-2.0
"""Our provider and Inspect's own read the same responses: equal outputs and logs."""

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="make test-interop")

import httpx
import openai
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelOutput, get_model
from inspect_ai.model._openai import OpenAIResponseError
from inspect_ai.tool import ToolInfo, ToolParams

from tests.client._answering import served

pytestmark = pytest.mark.interop

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
LOGPROBS = {
    "content": [
        {
            "token": "hi",
            "logprob": -0.5,
            "bytes": [104, 105],
            "top_logprobs": [{"token": "hi", "logprob": -0.5, "bytes": None}],
        }
    ]
}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"x": 1, "y": 2}'},
}
BAD_CALL = CALL | {"id": "call-2", "function": {"name": "add", "arguments": "{x"}}


def choice(index: int = 0, finish: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "hi", **message}
    return {"index": index, "finish_reason": finish, "message": said}


def completion(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "one", "object": "chat.completion", "created": 1, "model": "served"}
    return {**head, "choices": list(choices), "usage": USAGE, **more}


BODIES = {
    "plain": completion(choice()),
    "no usage": completion(choice(), usage=None),
    "tool calls": completion(
        choice(finish="tool_calls", content=None, tool_calls=[CALL, BAD_CALL])
    ),
    "log probabilities": completion(choice() | {"logprobs": LOGPROBS}),
    "prompt log probabilities": completion(
        choice(),
        prompt_logprobs=[
            None,
            {"5": {"logprob": -1.5, "rank": 1, "decoded_token": " a"}},
        ],
    ),
    "reasoning content": completion(choice(reasoning_content="because")),
    "reasoning": completion(choice(reasoning="because")),
    "think tags": completion(choice(content="<think>because</think>hi")),
    "refusal": completion(choice(content=None, refusal="no")),
    "length": completion(choice(finish="length")),
    "content filter": completion(choice(finish="content_filter", content="")),
    "choices out of order": completion(choice(1, content="b"), choice(0, content="a")),
    "no choices": completion(),
    "unknown fields": completion(choice(audio=None, other=[1]), other={"a": 1}),
    "wrong types": completion(choice(content="5"), created="now", model="served"),
}


@dataclass
class Scripted:
    """Sends the responses it is given, and keeps the requests."""

    replies: list[httpx.Response] = field(default_factory=list)
    requests: list[tuple[httpx.Headers, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            data = [{"id": "served", "max_model_len": 512}]
            return httpx.Response(200, json={"data": data})
        self.requests.append((request.headers, json.loads(request.content)))
        return self.replies.pop(0)

    def reply(self, status: int, body: Any, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"Content-Type": "application/json"} | named
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.replies.append(httpx.Response(status, headers=named, content=data))


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    with served(scripted) as url:
        scripted.url = f"{url}/v1"
        yield scripted


TOOL = ToolInfo(name="add", description="Add numbers.", parameters=ToolParams())


def asked(provider: str, url: str, stream: bool | None = None) -> Any:
    """What the provider returns: an output or an exception, and the logged call."""
    model = get_model(f"{provider}/served", base_url=url, memoize=False)
    config = GenerateConfig(max_tokens=4, top_logprobs=1, logprobs=True)

    async def run() -> Any:
        await model.api._ensure_server_started()
        model.api.stream = stream
        try:
            return await model.api.generate(
                [ChatMessageUser(content="hello")], [TOOL], "auto", config
            )
        except Exception as error:
            return error
        finally:
            await model.api.aclose()

    return asyncio.run(run())


def comparable(answer: Any) -> Any:
    """An answer without what differs from call to call, and our metadata."""
    if isinstance(answer, BaseException):
        return type(answer), str(answer)
    output, call = answer
    told = {"response": call.response, "error": call.error}
    if isinstance(output, BaseException):
        return type(output), str(output), told
    fields = output.model_dump(exclude={"metadata", "time"})
    for each in fields["choices"]:
        each["message"].pop("id")
    return fields, told


def both(server: Scripted, *replies: Any, **how: Any) -> tuple[Any, Any]:
    """The answers of Inspect's provider and of ours to the same responses."""
    answers = []
    for provider in ("vllm", "clearbox"):
        for status, body, headers in replies:
            server.reply(status, body, **headers)
        answers.append(asked(provider, server.url, **how))
        assert not server.replies, "not every response was asked for"
    return answers[0], answers[1]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_outputs_and_logs_are_equal(server: Scripted, body: dict[str, Any]) -> None:
    theirs, ours = both(server, (200, body, {}))
    assert isinstance(theirs[0], ModelOutput)
    assert comparable(ours) == comparable(theirs)
    (_, sent), (headers, own) = server.requests
    del own["return_token_ids"]
    assert own == sent
    assert headers["Authorization"] == "Bearer inspectai"


def error(message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": 400}}


TOO_LONG = error("This model's maximum context length is 512 tokens, not 600.")


def test_a_prompt_that_is_too_long_is_an_output(server: Scripted) -> None:
    theirs, ours = both(server, (400, TOO_LONG, {}))
    assert ours[0].stop_reason == "model_length"
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize("status", [400, 403, 413, 422])
def test_refusals_are_returned_and_logged(server: Scripted, status: int) -> None:
    theirs, ours = both(server, (status, error("temperature=-1"), {}))
    assert isinstance(ours[0], openai.APIStatusError)
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize("status", [408, 409, 429, 503])
def test_what_is_temporary_is_tried_again(server: Scripted, status: int) -> None:
    wait = {"Retry_After_Ms": "1"}
    again = (status, error("later"), wait)
    theirs, ours = both(server, again, again, (200, BODIES["plain"], {}))
    assert comparable(ours) == comparable(theirs)
    assert [h["X-Stainless-Retry-Count"] for h, _ in server.requests[3:]] == [*"012"]


def test_errors_that_last_are_raised_and_classified_alike(server: Scripted) -> None:
    again = (429, error("later"), {"Retry_After_Ms": "1", "Retry_After": "7"})
    theirs, ours = both(server, again, again, again)
    assert type(ours) is type(theirs) is openai.RateLimitError
    api = get_model("clearbox/served", base_url=server.url, memoize=False).api
    plain = get_model("vllm/served", base_url=server.url, memoize=False).api
    assert api.should_retry(ours) == plain.should_retry(theirs)
    assert ours.response.headers["retry-after"] == "7"


def test_what_is_no_completion_is_refused(server: Scripted) -> None:
    theirs, ours = both(server, (200, "text", {}))
    assert isinstance(ours, OpenAIResponseError)
    assert comparable(ours) == comparable(theirs)
    theirs, ours = both(server, (200, b"<html>", {"Content_Type": "text/html"}))
    assert isinstance(ours, OpenAIResponseError)
    assert comparable(ours) == comparable(theirs)
    theirs, ours = both(server, (200, b"{", {}))
    assert comparable(ours) == comparable(theirs)


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    one = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "one", "object": "chat.completion.chunk", "created": 1}
    told = {**head, "model": "served", "choices": [one]}
    return f"data: {json.dumps(told)}\n\n".encode()


def test_streams_are_equal(server: Scripted) -> None:
    text = chunk(role="assistant", content="a") + chunk(content="b") + chunk("stop")
    data = text + b"data: [DONE]\n\n"
    theirs, ours = both(
        server, (200, data, {"Content_Type": "text/event-stream"}), stream=True
    )
    assert ours[0].completion == "ab"
    assert comparable(ours) == comparable(theirs)


def test_a_server_that_is_gone_is_reported_alike(server: Scripted) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        answers = [asked(provider, url) for provider in ("vllm", "clearbox")]
    assert comparable(answers[1]) == comparable(answers[0])
    assert type(answers[1]) is openai.APIConnectionError


def test_a_model_serves_several_event_loops(server: Scripted) -> None:
    model = get_model("clearbox/served", base_url=server.url, memoize=False)
    texts = []
    for _ in range(2):
        server.reply(200, BODIES["plain"])
        server.reply(200, BODIES["plain"])

        async def run() -> None:
            for _ in range(2):
                texts.append((await model.generate("hello")).completion)

        asyncio.run(run())
    assert texts == ["hi"] * 4
    assert len(server.requests) == 4
