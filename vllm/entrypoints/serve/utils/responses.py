# SPDX-License-Identifier: Apache-2.0
"""The results of requests in the responses of upstream's serving classes."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.capture.answers import carries_rows, event
from vllm.exceptions import VLLMClientError
from vllm.interop.vllm_lens import responses as lens
from vllm.interop.vllm_lens.responses import last_chunks
from vllm.v1.capture.frontend import http as capture
from vllm.v1.readouts.frontend import http as readouts
from vllm.v1.steering import receipts
from vllm.v1.steering.receipts import response_receipts

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


__all__ = [
    "carries_rows",
    "complete",
    "event",
    "last_chunks",
    "log_error",
    "response_receipts",
    "stamp",
    "unset",
]

RESULTS = frozenset({"capture_results", "readouts", "steering"})


def complete(response: Any, outputs: "Sequence[RequestOutput | None]") -> None:
    """Set the fields of a whole response that the features have added to its class.

    Args:
        response: a response to one or several prompts.
        outputs: their final outputs, in the prompts' order.

    """
    fields = type(response).model_fields
    if "activations" in fields:
        # First: the capture results then omit these rows.
        response.activations = lens.response_activations(outputs)
        response.hook_results = lens.response_hook_results(outputs)
    response.capture_results = capture.response_results(outputs)
    response.readouts = readouts.response_readouts(outputs)
    response.steering = response_receipts(outputs)


def stamp(chunk: Any, output: "RequestOutput", part: "CompletionOutput") -> None:
    """Set the fields of a streamed chunk: its readouts, and in the last one the rest.

    Args:
        chunk: the chunk, made from `part`.
        output: the engine's output.
        part: the part of `output` that belongs to one sample.

    """
    lens.detach(output)
    capture.stamp(chunk, output, part)
    readouts.stamp(chunk, part)
    receipts.stamp(chunk, part)


def unset(chunk: Any) -> set[str]:
    """The fields of results that a streamed chunk does not have."""
    return set(RESULTS - chunk.model_fields_set)


def log_error(logger: logging.Logger, summary: str, error: Exception) -> None:
    """Log a failure, with its traceback unless the request was invalid.

    A stream's response has begun with status 200 when its request is validated, so the
    access log does not show the refusal.
    """
    if isinstance(error, VLLMClientError):
        logger.info("A streamed request was refused: %s", error)
    else:
        logger.error(summary, exc_info=error)
