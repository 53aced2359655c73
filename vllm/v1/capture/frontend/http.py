# SPDX-License-Identifier: Apache-2.0
"""Capture results in HTTP responses."""

import base64
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, model_serializer

from vllm.v1.capture.results import (
    COUNTED,
    RowsByTap,
    is_by_tap,
    merge_samples,
    sendable,
)
from vllm.v1.capture.transport.parts import (
    Part,
    Reference,
    described,
    parts_of_payload,
)
from vllm.v1.capture.types import CaptureResult

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


class Deferred(BaseModel):
    """A result with rows whose encoding is deferred until the response is sent.

    It is encoded as base64 JSON if the response model is dumped as a whole.
    """

    result: Any
    """A `CaptureResult`."""

    @model_serializer
    def _as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = as_json({"": self.result})[""]
        return result


def response_results(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The field `capture_results` of a response to one or several prompts.

    With several prompts, each payload is a dict by prompt index.
    """
    found = {
        index: output.capture_results
        for index, output in enumerate(outputs)
        if output is not None and output.capture_results
    }
    if not found:
        return None
    if len(outputs) == 1:
        return deferred(found[0])
    names = sorted({name for results in found.values() for name in results})
    # The id of each prompt is that of the response with a number appended.
    response_id = outputs[min(found)].request_id.rpartition("-")[0]  # type: ignore[union-attr]
    return deferred(
        {
            name: merge_samples(
                response_id,
                {i: results[name] for i, results in found.items() if name in results},
            )
            for name in names
        }
    )


def deferred(results: Mapping[str, CaptureResult]) -> dict[str, Any]:
    """Results by instance as JSON, except those with rows, which are `Deferred`."""
    return {
        name: Deferred.model_construct(result=result)
        if has_rows(result.payload)
        else as_json({name: result})[name]
        for name, result in results.items()
    }


def has_rows(payload: Any) -> bool:
    """Whether a payload is, or as a dict contains, `RowsByTap`."""
    if isinstance(payload, RowsByTap):
        return True
    return isinstance(payload, dict) and any(map(has_rows, payload.values()))


def in_base64(part: Part) -> dict[str, str]:
    """The rows of a part as base64, in row-major order.

    The values are little-endian `dtype`, so bfloat16 is exact.
    """
    return {"data": base64.b64encode(part.data).decode()}


def as_json(
    results: Mapping[str, CaptureResult], reference: Reference = in_base64
) -> dict[str, Any]:
    """Results by instance, as JSON, with an object for each tap of rows.

    `reference` makes what stands for the rows of a part.
    """
    return {
        name: {
            "key": list(result.key),
            "status": result.status,
            "error": None if result.error is None else sendable(result.error),
            "payload": _plain(result.payload, name, reference),
            **{
                field: rows
                for field in COUNTED
                if (rows := getattr(result, field)) is not None
            },
        }
        for name, result in results.items()
    }


def _plain(payload: Any, path: str, reference: Reference) -> Any:
    """A payload as JSON; NaN and infinities become null."""
    if isinstance(payload, RowsByTap):
        parts = parts_of_payload(path, payload)
        return [described(part, reference) for part in parts]
    if isinstance(payload, torch.Tensor):
        payload = payload.detach().cpu().tolist()
    elif isinstance(payload, (np.ndarray, np.generic)):
        payload = payload.tolist()
    if is_by_tap(payload):
        return [
            {
                "layer": layer,
                "hook": sendable(hook),
                "value": _plain(value, path, reference),
            }
            for (layer, hook), value in payload.items()
        ]
    if isinstance(payload, Mapping):
        return {
            sendable(str(key)): _plain(value, f"{path}/{key}", reference)
            for key, value in payload.items()
        }
    if isinstance(payload, (list, tuple)):
        return [_plain(value, path, reference) for value in payload]
    if isinstance(payload, float):
        return payload if isfinite(payload) else None
    if payload is None or isinstance(payload, (bool, int)):
        return payload
    if isinstance(payload, bytes):
        return base64.b64encode(payload).decode()
    if isinstance(payload, (str, Path)):
        return sendable(str(payload))
    try:
        return sendable(repr(payload))
    except Exception:  # The `__repr__` of a plug-in's class may raise.
        return f"<{type(payload).__name__}>"


def stamp(chunk: Any, output: "RequestOutput", part: "CompletionOutput") -> None:
    """Copy the results of an output into its chunk of a streaming response.

    An output may have parts of several samples, each with a chunk of its own; the
    results go into the chunk of the last part.

    Args:
        chunk: the chunk of the response, made from `part`.
        output: the engine's output, intermediate or final.
        part: the part of `output` that belongs to one sample.

    """
    if output.capture_results and part is output.outputs[-1]:
        chunk.capture_results = deferred(output.capture_results)
