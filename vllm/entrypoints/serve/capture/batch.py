# SPDX-License-Identifier: Apache-2.0
"""Captures in the requests of `vllm run-batch`."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest


def wait_for_results(body: Any) -> None:
    """Have a batch request wait for its capture, unless it says otherwise itself.

    Consumers may also capture a request that has no `capture` field, so every
    generation request waits. The other kinds of requests cannot be captured.
    """
    if isinstance(body, ChatCompletionRequest):
        said = "capture_wait" in body.model_fields_set
        body.capture_wait = body.capture_wait if said else True
