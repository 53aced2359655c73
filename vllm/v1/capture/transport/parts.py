# SPDX-License-Identifier: Apache-2.0
"""Splits results into a small JSON document and the rows that it refers to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.types import CaptureResult

Reference: TypeAlias = Callable[[Any], Any]
"""`reference(part)`: the entries in the document that stand for a part's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of one tap of one result."""

    name: str
    """`instance/layer_hook`, or `instance/index/layer_hook` with several samples or
    prompts."""
    layer: int
    hook: str
    rows: torch.Tensor  # [rows, hidden_size], on the CPU
    positions: list[int]
    token_ids: list[int | None]
    transport: str
    """`"http"`, or `"shm"` for shared memory with a client on the same host."""
    heads: Sequence[int] = ()
    """The heads of which the rows consist; empty if they are whole."""

    @property
    def dtype(self) -> str:
        """The rows' dtype, such as `"bfloat16"`."""
        return str(self.rows.dtype).removeprefix("torch.")

    @property
    def data(self) -> memoryview:
        """The row-major, little-endian bytes of the rows; no copy if contiguous."""
        return raw_bytes(self.rows)


def parts_of(results: Mapping[str, CaptureResult]) -> list[Part]:
    """The rows of all results, in the order of the document."""
    return [
        part
        for name, result in results.items()
        for part in parts_of_payload(name, result.payload)
    ]


def parts_of_payload(path: str, payload: Any) -> list[Part]:
    """The rows of one payload; `path` is the name of its result."""
    if isinstance(payload, RowsByTap):
        return [
            Part(
                f"{path}/{layer}_{hook}",
                layer,
                hook,
                rows,
                payload.positions[layer, hook],
                payload.token_ids[layer, hook],
                payload.transport,
                payload.heads,
            )
            for (layer, hook), rows in payload.items()
        ]
    if isinstance(payload, Mapping):
        return [
            part
            for key, value in payload.items()
            for part in parts_of_payload(f"{path}/{key}", value)
        ]
    return []


def described(part: Part, reference: Reference) -> dict[str, Any]:
    """The entry of a part in the document."""
    return {
        "layer": part.layer,
        "hook": part.hook,
        "positions": part.positions,
        "token_ids": part.token_ids,
        "dtype": part.dtype,
        "shape": list(part.rows.shape),
        **({"heads": list(part.heads)} if part.heads else {}),
        **reference(part),
    }
