# SPDX-License-Identifier: Apache-2.0
"""Capture in the requests of `vllm run-batch`."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest


def wait_for_results(body: Any) -> None:
    """Default a batch request's `capture_wait` to true.

    Consumers may also capture a request without a `capture` field, so this applies to
    every generation request. Other kinds of requests cannot be captured.
    """
    if isinstance(body, ChatCompletionRequest):
        said = "capture_wait" in body.model_fields_set
        body.capture_wait = body.capture_wait if said else True
