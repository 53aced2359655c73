# SPDX-License-Identifier: Apache-2.0
"""The model providers, based on Inspect's provider for vLLM."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx2
from clearbox_client import bulk
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.vllm import VLLMAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import NotGiven
from openai.types.chat import ChatCompletion

from vllm.interop.inspect_ai.activations import activations_of, without_rows
from vllm.interop.inspect_ai.responses import (
    body_of,
    document_in,
    layers_of,
    lora_name,
    shown,
)
from vllm.interop.vllm_lens import hook_wire

CLIENT_SECONDS = 3600.0
"""Timeout of a request in seconds, unless `client_timeout` is given."""

TAKEN = ("activations", "hook_results", "prompt_token_ids", "capture_results")
"""Response fields that go to the output's metadata and not to the log."""


@dataclass(slots=True)
class _Call:
    """The data of one call of `generate` that Inspect does not log."""

    body: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


_CALL: ContextVar[_Call] = ContextVar("clearbox_call")


class LensAPI(VLLMAPI):
    """`vllm-lens/MODEL`: starts, or connects to, a server with `--vllm-lens-api`.

    `GenerateConfig.extra_body["extra_args"]` has vllm-lens' keys; other keys of
    `extra_body` are request fields, such as `capture` and `readouts`.
    """

    server_defaults: ClassVar[dict[str, Any]] = {"vllm_lens_api": True}

    def __init__(self, model_name: str, **given: Any) -> None:
        """Create the provider.

        Args:
            model_name: the model.
            given: arguments of Inspect's own provider, and options of `vllm serve`.

        """
        defaults = {"client_timeout": CLIENT_SECONDS, **self.server_defaults}
        super().__init__(model_name, **{**defaults, **given})

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generate; the output's metadata has activations and readouts."""
        call = _Call()
        token = _CALL.set(call)
        try:
            answer = await super().generate(input, tools, tool_choice, config)
        finally:
            _CALL.reset(token)
        output = answer[0] if isinstance(answer, tuple) else answer
        if isinstance(output, ModelOutput):
            output.metadata = {**(output.metadata or {}), **call.metadata}
        return answer

    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        """The request in the form that is logged; omitted values are still sent."""
        params: dict[str, Any] = super().completion_params(config, tools)
        extra = params.get("extra_body") or {}
        call = _CALL.get()
        call.body, call.layers = body_of(extra), layers_of(extra)
        params["extra_body"] = shown(call.body)
        if (name := lora_name(extra)) is not None:
            params["model"] = name
        return params

    async def _generate_completion(
        self, request: dict[str, Any], config: GenerateConfig
    ) -> Any:
        call = _CALL.get()
        if self.resolve_stream(config):
            sent = {**request, "extra_body": call.body}
            completion = await super()._generate_completion(sent, config)
        else:
            completion = await self._complete(request, call.body)
        if isinstance(completion, ChatCompletion):
            call.metadata = _taken(completion, call.layers)
        return completion

    async def _complete(self, request: dict[str, Any], extra: dict[str, Any]) -> Any:
        """Send a request by OpenAI's client, which retries, and parse its response.

        Its `chat.completions.create` would walk through the whole request once more to
        rename fields, of which chat completions have none, and reads only JSON.
        """
        fields = {
            name: value
            for name, value in request.items()
            if name not in ("extra_body", "extra_headers")
            and not isinstance(value, NotGiven)
        }
        body = fields | extra
        response = await self.client.post(
            "/chat/completions",
            cast_to=httpx2.Response,
            body=body,
            options={"headers": bulk.accept_of(body) | request["extra_headers"]},
        )
        document = document_in(response)
        if isinstance(document, dict):
            return ChatCompletion.construct(**document)
        return document  # Inspect refuses it


class ClearboxAPI(LensAPI):
    """`clearbox/MODEL`: like `vllm-lens/MODEL`, with rows in responses and readouts.

    `extra_body` may have `capture`, `steering_vectors`, `readouts` and similar fields,
    in addition to those of `vllm-lens/MODEL`.
    """

    server_defaults: ClassVar[dict[str, Any]] = {
        "vllm_lens_api": True,
        "enable_readouts": True,
        "capture_consumers": "inline",
    }


def _taken(completion: Any, layers: list[int] | None) -> dict[str, Any]:
    """Move the fields for the metadata out of the completion."""
    extra = completion.__pydantic_extra__ or {}
    response = {name: extra.pop(name) for name in TAKEN if name in extra}
    found: dict[str, Any] = {}
    if activations := activations_of(response, layers):
        found["activations"] = activations
    if (results := response.get("capture_results")) is not None:
        found["capture_results"] = without_rows(results)
    if response.get("hook_results") is not None:
        found["hook_results"] = hook_wire.decode(response["hook_results"])
    if response.get("prompt_token_ids") is not None:
        found["prompt_token_ids"] = response["prompt_token_ids"]
    for name in ("readouts", "steering"):
        if extra.get(name) is not None:
            found[name] = extra[name]
    token_ids = [
        (choice.__pydantic_extra__ or {}).pop("token_ids", None)
        for choice in completion.choices
    ]
    if any(ids is not None for ids in token_ids):
        found["token_ids"] = token_ids[0] if len(token_ids) == 1 else token_ids
    return found
