# SPDX-License-Identifier: Apache-2.0
"""Capture and steering in the requests of `vllm run-batch`."""

import json
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True, slots=True)
class RefusedBody:
    """Stands for the body of a line that has a refused field."""

    message: str


def read_line(line_class: Any, text: str) -> Any:
    """Parse a line of a batch file.

    Args:
        line_class: upstream's pydantic class of a line.
        text: the line's JSON.

    Returns:
        The line. If its capture or steering fields are refused, its body is a
        `RefusedBody`, so that the other lines of the file are run.

    Raises:
        pydantic.ValidationError: the line is invalid for another reason.

    """
    try:
        return line_class.model_validate_json(text)
    except VLLMValidationError as error:
        line = json.loads(text)
        if not isinstance(line.get("custom_id"), str):
            raise
        return line_class.model_construct(
            custom_id=line["custom_id"],
            method="POST",
            # The body is checked only if this is valid.
            url=line["url"],
            body=RefusedBody(str(error)),
        )


def refusal(body: Any) -> str | None:
    """Why a line is refused; None if it is not."""
    return body.message if isinstance(body, RefusedBody) else None


def wait_for_results(body: Any) -> None:
    """Default a batch request's `capture_wait` to true.

    Consumers may also capture a request without a `capture` field, so this applies to
    every generation request. Other kinds of requests cannot be captured.
    """
    if isinstance(body, ChatCompletionRequest):
        said = "capture_wait" in body.model_fields_set
        body.capture_wait = body.capture_wait if said else True
