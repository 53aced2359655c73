# SPDX-License-Identifier: Apache-2.0
"""Capture in HTTP requests and responses."""

import base64
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.v1.capture.payload import RowsByTap, is_by_tap, sendable
from vllm.v1.capture.results import merge_samples
from vllm.v1.capture.types import CaptureResult

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


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
        return as_json(found[0])
    names = sorted({name for results in found.values() for name in results})
    # Each prompt's id is the response's with a number behind it.
    response_id = outputs[min(found)].request_id.rpartition("-")[0]  # type: ignore[union-attr]
    return as_json(
        {
            name: merge_samples(
                response_id,
                {i: results[name] for i, results in found.items() if name in results},
            )
            for name in names
        }
    )


def as_json(results: Mapping[str, CaptureResult]) -> dict[str, Any]:
    """Results by instance, as JSON."""
    return {
        name: {
            "key": list(result.key),
            "status": result.status,
            "error": None if result.error is None else sendable(result.error),
            "payload": _plain(result.payload),
        }
        for name, result in results.items()
    }


def rows_as_json(payload: RowsByTap) -> list[dict[str, Any]]:
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


def _encoded(rows: torch.Tensor, encoding: str | None) -> dict[str, str]:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    if encoding is None:
        return {"data": base64.b64encode(data).decode()}
    import pyarrow

    assert encoding == "zstd", f"admission let the encoding {encoding!r} through"
    data = pyarrow.compress(data, codec=encoding, asbytes=True)
    return {"encoding": encoding, "data": base64.b64encode(data).decode()}


def _plain(payload: Any) -> Any:
    """A payload as JSON; what JSON has no number for is null."""
    if isinstance(payload, RowsByTap):
        return rows_as_json(payload)
    if isinstance(payload, torch.Tensor):
        payload = payload.detach().cpu().tolist()
    elif isinstance(payload, (np.ndarray, np.generic)):
        payload = payload.tolist()
    if is_by_tap(payload):
        return [
            {"layer": layer, "hook": sendable(hook), "value": _plain(value)}
            for (layer, hook), value in payload.items()
        ]
    if isinstance(payload, Mapping):
        return {sendable(str(key)): _plain(value) for key, value in payload.items()}
    if isinstance(payload, (list, tuple)):
        return [_plain(value) for value in payload]
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


def stamp(chunk: Any, output: "RequestOutput", part: "CompletionOutput") -> None:
    """Put the results of a final output into the chunk that ends its stream.

    A final output may end several samples. Each is a `part` of it with a chunk of its
    own, and the chunk of the last one is the stream's last.
    """
    if output.finished and output.capture_results and part is output.outputs[-1]:
        chunk.capture_results = as_json(output.capture_results)
