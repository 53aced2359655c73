# SPDX-License-Identifier: Apache-2.0
"""JSON form of readout results in HTTP responses.

Arrays are nested lists, with null for NaN and infinity. Rows are objects with `dtype`,
`shape` and `data`, the base64 of the little-endian bytes, like packed steering vectors.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.v1.readouts.results import Array, ReadoutResult
from vllm.v1.residual.choices import by_choice

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


def response_readouts(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The `readouts` field of a response to one or several prompts.

    With several choices, results are keyed by the choice's index as a string. None if
    there are no results.
    """
    found: dict[str, Any] | None = by_choice(
        outputs, lambda sample: as_json(sample.readouts or {})
    )
    return found


def stamp(chunk: Any, part: "CompletionOutput") -> None:
    """Set the `readouts` field of a streamed chunk; the last one has all results."""
    if part.readouts:
        chunk.readouts = as_json(part.readouts)


def as_json(results: Mapping[str, ReadoutResult]) -> dict[str, Any]:
    """JSON-serialisable results by name."""
    return {name: _result(one) for name, one in results.items()}


def _result(result: ReadoutResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": result.kind,
        "positions": result.positions,
        "taps": [list(tap) for tap in result.taps],
    }
    for name, array in result.arrays.items():
        found[name] = _packed(array) if name == "rows" else _listed(array)
    if result.error is not None:
        found["error"] = result.error
    if result.note is not None:
        found["note"] = result.note
    if result.num_prompt_tokens is not None:
        found["num_prompt_tokens"] = result.num_prompt_tokens
    return found


def _packed(array: Array) -> dict[str, Any]:
    data = np.ascontiguousarray(array)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": str(data.dtype),
        "shape": list(data.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


def _listed(array: Array) -> Any:
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        return _without_nan(array.tolist())
    return array.tolist()


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return value if np.isfinite(value) else None
