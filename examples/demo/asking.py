# SPDX-License-Identifier: Apache-2.0
"""The requests that the demo sends, with a capture of the residual stream."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

TAG = "demo"
POINTS = ("pre_attn", "post_attn", "post_block")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the server, and the result of its capture."""

    name: str
    """The folder of the capture."""
    prompt: str
    text: str
    results: dict[str, Any]
    """`capture_results` of the response: per consumer, status, error and payload."""


def capture_of(name: str) -> dict[str, Any]:
    """The capture options: all rows of all layers at the three points of the stream."""
    return {
        "filesystem": {
            "tag": TAG,
            "request_id": name,
            "hooks": dict.fromkeys(POINTS, "all"),
            "positions": "all",
        }
    }


class Client:
    """An HTTP client for one server."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=180)
        self._model = model

    def _body(self, name: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "capture": capture_of(name),
            # The response is sent when the files are complete.
            "capture_wait": True,
        }

    def complete(self, name: str, prompt: str, max_tokens: int) -> Answer:
        """Request one completion."""
        body = {**self._body(name, max_tokens), "prompt": prompt}
        response = self._http.post("/v1/completions", json=body)
        response.raise_for_status()
        reply = response.json()
        text = reply["choices"][0]["text"]
        return Answer(name, prompt, text, reply["capture_results"])

    def complete_all(self, prompts: dict[str, str], max_tokens: int) -> list[Answer]:
        """Request several completions at once, so that the server batches them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [
                pool.submit(self.complete, name, prompt, max_tokens)
                for name, prompt in prompts.items()
            ]
            return [job.result() for job in jobs]

    def chat(
        self, name: str, question: str, max_tokens: int, show: Callable[[str], None]
    ) -> Answer:
        """Request a streamed chat; `show` receives each piece of text as it arrives."""
        body = {
            **self._body(name, max_tokens),
            "messages": [{"role": "user", "content": question}],
            "stream": True,
        }
        text, results = "", {}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                chunk = _chunk_of(line)
                for choice in chunk.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    show(piece)
                    text += piece
                results = chunk.get("capture_results") or results
        return Answer(name, question, text, results)

    def refusal(self, layer: int) -> str:
        """The error message for a request that names a layer that does not exist."""
        body = {**self._body("refused", 1), "prompt": "Anna"}
        body["capture"]["filesystem"]["hooks"] = {"post_block": [layer]}
        response = self._http.post("/v1/completions", json=body)
        message = response.json().get("error", {}).get("message", response.text)
        return f"HTTP {response.status_code}: {message}"


def _chunk_of(line: str) -> dict[str, Any]:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    chunk: dict[str, Any] = json.loads(data)
    return chunk
