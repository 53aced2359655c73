# SPDX-License-Identifier: Apache-2.0
"""Capture in HTTP requests and responses."""

import base64
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, model_serializer

from vllm.v1.capture.payload import RowsByTap, is_by_tap, sendable
from vllm.v1.capture.results import merge_samples
from vllm.v1.capture.types import CaptureResult

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


Show: TypeAlias = Callable[[str, RowsByTap], list[dict[str, Any]]]
"""`show(path, payload)`: rows as JSON; the path is one that `parts_of` gives."""


class Deferred(BaseModel):
    """A result with rows, in a response that nobody has encoded yet.

    Where a response is dumped as a whole, it becomes JSON like any other.
    """

    result: Any
    """A `CaptureResult`."""

    @model_serializer
    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = as_json({"": self.result})[""]
        return told


def response_results(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """`capture_results` of a response to one or several prompts."""
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
    # Each prompt's id is the response's with a number behind it.
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
    """Results by instance: as JSON, but for those with rows."""
    return {
        name: Deferred.model_construct(result=result)
        if has_rows(result.payload)
        else as_json({name: result})[name]
        for name, result in results.items()
    }


def has_rows(payload: Any) -> bool:
    """Whether a payload holds rows, of one sample or prompt or of several."""
    if isinstance(payload, RowsByTap):
        return True
    return isinstance(payload, dict) and any(map(has_rows, payload.values()))


def rows_as_json(path: str, payload: RowsByTap) -> list[dict[str, Any]]:
    """One object per tap; `data` is base64 of the rows' bytes, row by row.

    The bytes are those of `dtype`, little-endian, so bfloat16 is exact. With
    `"encoding": "zstd"` they are a zstd frame.
    """
    return [
        {
            "layer": layer,
            "hook": hook,
            "positions": payload.positions[layer, hook],
            "token_ids": payload.token_ids[layer, hook],
            "dtype": str(rows.dtype).removeprefix("torch."),
            "shape": list(rows.shape),
            **_encoded(rows, payload.encoding),
        }
        for (layer, hook), rows in payload.items()
    ]


def as_json(
    results: Mapping[str, CaptureResult], show: Show = rows_as_json
) -> dict[str, Any]:
    """Results by instance, as JSON; `show` says how rows are."""
    return {
        name: {
            "key": list(result.key),
            "status": result.status,
            "error": None if result.error is None else sendable(result.error),
            "payload": _plain(result.payload, name, show),
        }
        for name, result in results.items()
    }


def _encoded(rows: torch.Tensor, encoding: str | None) -> dict[str, str]:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    if encoding is None:
        return {"data": base64.b64encode(data).decode()}
    import pyarrow

    assert encoding == "zstd", f"admission let the encoding {encoding!r} through"
    data = pyarrow.compress(data, codec=encoding, asbytes=True)
    return {"encoding": encoding, "data": base64.b64encode(data).decode()}


def _plain(payload: Any, path: str, show: Show) -> Any:
    """A payload as JSON; what JSON has no number for is null."""
    if isinstance(payload, RowsByTap):
        return show(path, payload)
    if isinstance(payload, torch.Tensor):
        payload = payload.detach().cpu().tolist()
    elif isinstance(payload, (np.ndarray, np.generic)):
        payload = payload.tolist()
    if is_by_tap(payload):
        return [
            {"layer": layer, "hook": sendable(hook), "value": _plain(value, path, show)}
            for (layer, hook), value in payload.items()
        ]
    if isinstance(payload, Mapping):
        return {
            sendable(str(key)): _plain(value, f"{path}/{key}", show)
            for key, value in payload.items()
        }
    if isinstance(payload, (list, tuple)):
        return [_plain(value, path, show) for value in payload]
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
    except Exception:  # A class of a plug-in.
        return f"<{type(payload).__name__}>"


def stamp(chunk: Any, output: "RequestOutput", part: "CompletionOutput") -> bool:
    """Put the results of a final output into the chunk that ends its stream.

    A chunk before it gets the rows of its tokens, where the request asked for them.

    A final output may end several samples. Each is a `part` of it with a chunk of its
    own, and the chunk of the last one is the stream's last.

    Returns:
        Whether the chunk has rows.

    """
    if not output.capture_results:
        return False
    if part is not output.outputs[-1]:
        return False
    chunk.capture_results = deferred(output.capture_results)
    return any(isinstance(told, Deferred) for told in chunk.capture_results.values())
