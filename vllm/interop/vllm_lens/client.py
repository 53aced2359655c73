# SPDX-License-Identifier: Apache-2.0
"""A client with the methods of vllm-lens' client."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
import torch

from vllm.interop.vllm_lens import hook_wire, tensors
from vllm.interop.vllm_lens.requests import INSTANCE
from vllm.interop.vllm_lens.steering_vector import SteeringVector


@dataclass(slots=True)
class GenerateOutput:
    """A server's response."""

    text: str
    activations: dict[str, torch.Tensor] | None
    """`residual_stream`: `[layers ascending, tokens, hidden_size]`."""
    hook_results: dict[str, Any] | None
    """By the hook's number in the request, as text: what it saved."""
    logprobs: Any
    raw: dict[str, Any] = field(repr=False)
    """The response's JSON."""


class VLLMLensClient:
    """A client of a server started with `--vllm-lens-api`.

    Args:
        base_url: the server's address, such as `http://127.0.0.1:8000`.
        model: the model's name; None for the first of `/v1/models`.
        api_key: the server's key, if it has one.
        timeout: most seconds for a request.

    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._session = requests.Session()
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._model = model

    @property
    def model(self) -> str:
        """The model's name on the server."""
        if self._model is None:
            answer = self._session.get(
                f"{self.base_url}/v1/models", timeout=self._timeout
            )
            self._model = str(_checked(answer)["data"][0]["id"])
        return self._model

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Any = None,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        logprobs: int | None = None,
        echo: bool | None = None,
        **more: Any,
    ) -> GenerateOutput:
        """Complete a prompt.

        Raises:
            RuntimeError: the server refused the request, or rows are missing; has the
                server's message.

        """
        body = {"prompt": prompt, "logprobs": logprobs, "echo": echo, **more}
        body |= {"max_tokens": max_tokens, "temperature": temperature}
        answer = self._complete(
            "completions", body, hooks, capture_layers, steering_vectors
        )
        return _output(answer, answer["choices"][0]["text"])

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Any = None,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        **more: Any,
    ) -> GenerateOutput:
        """Generate the next message of a conversation.

        Raises:
            RuntimeError: the server refused the request, or rows are missing; has the
                server's message.

        """
        body = {"messages": list(messages), **more}
        body |= {"max_tokens": max_tokens, "temperature": temperature}
        answer = self._complete(
            "chat/completions", body, hooks, capture_layers, steering_vectors
        )
        return _output(answer, answer["choices"][0]["message"].get("content") or "")

    def register_hooks(
        self, hooks: Sequence[Any], prefetch_params: Sequence[str] | None = None
    ) -> int:
        """Run functions for all requests from now on; returns how many were added.

        Raises:
            RuntimeError: with the server's message, as the methods below.

        """
        body: dict[str, Any] = {"hooks": [_dumped(one) for one in hooks]}
        if prefetch_params is not None:
            body["prefetch_params"] = list(prefetch_params)
        return int(self._post("hooks/register", body)["count"])

    def collect_hook_results(self) -> dict[str, dict[str, Any]]:
        """What registered functions saved: `{request id: {hook: saved}}`.

        It stays until `clear_hook_results` or `clear_hooks`.
        """
        results: dict[str, dict[str, Any]] = self._post("hooks/collect", {})["results"]
        return {name: hook_wire.decode(one) for name, one in results.items()}

    def clear_hooks(self) -> None:
        """Remove the registered functions, and drop what they saved."""
        self._post("hooks/clear", {})

    def clear_hook_results(self) -> None:
        """Drop what registered functions saved."""
        self._post("hooks/clear_results", {})

    def prefetch_params(self, names: Sequence[str]) -> list[str]:
        """Keep whole parameters in every worker, for `ctx.get_parameter`."""
        return list(self._post("hooks/prefetch", {"params": list(names)})["params"])

    def clear_prefetched(self) -> None:
        """Drop prefetched parameters."""
        self._post("hooks/clear_prefetched", {})

    def _complete(
        self,
        route: str,
        body: dict[str, Any],
        hooks: Any,
        layers: Sequence[int] | bool | None,
        vectors: Sequence[SteeringVector] | None,
    ) -> dict[str, Any]:
        args = dict(body.pop("vllm_xargs", None) or {})
        if hooks:
            args["apply_hooks"] = json.dumps([_dumped(one) for one in hooks])
        if layers is not None:
            wanted = layers if isinstance(layers, bool) else list(layers)
            args["output_residual_stream"] = json.dumps(wanted)
        if vectors:
            dumped = [vector.model_dump() for vector in vectors]
            args["apply_steering_vectors"] = json.dumps(dumped)
        body = {"model": self.model, **body, "vllm_xargs": args or None}
        return self._post(route, {n: one for n, one in body.items() if one is not None})

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        address = f"{self.base_url}/v1/{route}"
        return _checked(self._session.post(address, json=body, timeout=self._timeout))


def _checked(answer: requests.Response) -> dict[str, Any]:
    try:
        body: dict[str, Any] = answer.json()
    except ValueError:
        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:500]}") from None
    if "error" in body or not answer.ok:
        error = body.get("error", body)
        message = error.get("message", error) if isinstance(error, dict) else error
        raise RuntimeError(f"HTTP {answer.status_code}: {message}")
    return body


def _output(answer: dict[str, Any], text: str) -> GenerateOutput:
    lost = (answer.get("capture_results") or {}).get(INSTANCE)
    if lost is not None:
        raise RuntimeError(f"activations are not complete: {lost['error']}")
    activations = tensors.decode_all(answer) or None
    saved = answer.get("hook_results")
    results = None if saved is None else hook_wire.decode(saved)
    logprobs = answer["choices"][0].get("logprobs")
    return GenerateOutput(text, activations, results, logprobs, answer)


def _dumped(hook: Any) -> Any:
    """A `Hook` as JSON; a mapping is JSON already."""
    return hook if isinstance(hook, dict) else hook.model_dump()
