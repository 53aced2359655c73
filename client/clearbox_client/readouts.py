# SPDX-License-Identifier: Apache-2.0
"""Readouts of rows on the server, as numpy arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from clearbox_client import html, notebook
from clearbox_client.payloads import packed_values
from numpy.typing import NDArray

_FACTS = ("kind", "positions", "taps", "error", "num_prompt_tokens", "note")
_INTEGERS = ("token_ids", "features", "keys")


@dataclass(frozen=True)
class Readout:
    """The result of one readout, or the part of it in a chunk of a stream.

    The first dimension of `arrays` is `positions`; for kinds with a result per tap
    (`lens`, `norm`, `rows`, `attention`, `attribution`) the second is `taps`. Reduced
    rows have only the latter, a full pattern has `[heads, positions, context]`.
    """

    kind: str
    """`probe`, `lens`, `sae`, `norm`, `rows`, `attention`, `attribution` or
    `custom`."""
    positions: list[int]
    taps: list[tuple[int, str]]
    """`(layer, hook point)` of each tap."""
    arrays: dict[str, NDArray[Any]]
    error: str | None = None
    """The error of the readout or of a part of it."""
    num_prompt_tokens: int | None = None
    """In chunks: position p is that of generated token `p - num_prompt_tokens`."""
    note: str | None = None
    """Set if the request changes the stream where it is read, after reading it."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Readout":
        """Parse a result from the server's JSON; null becomes NaN."""
        return cls(
            kind=answer["kind"],
            positions=list(answer["positions"]),
            taps=[(layer, hook) for layer, hook in answer["taps"]],
            arrays={
                name: _array(name, value)
                for name, value in answer.items()
                if name not in _FACTS
            },
            error=answer.get("error"),
            num_prompt_tokens=answer.get("num_prompt_tokens"),
            note=answer.get("note"),
        )

    @property
    def is_full(self) -> bool:
        """Whether it is a full attention pattern, `[heads, positions, context]`."""
        weights = self.arrays.get("weights")
        return self.kind == "attention" and weights is not None and weights.ndim == 3

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        parts = [self.kind, f"{len(self)} positions", f"{len(self.taps)} taps"]
        parts += [f"{name} {list(one.shape)}" for name, one in self.arrays.items()]
        told = {"error": self.error, "note": self.note}
        parts += [f"{name}={text!r}" for name, text in told.items() if text]
        return f"Readout({', '.join(parts)})"

    def _repr_html_(self) -> str:
        if not self.is_full and self.kind != "attribution":
            return notebook.readout_of(self)
        places = range(max(self.positions, default=-1) + 1)
        return html.frame(html.readout_parts([*map(str, places)], {"": self}, {}))


def readouts_of(answer: Mapping[str, Any] | None) -> dict[str, Readout]:
    """All readouts of one choice, by name."""
    return {name: Readout.of(one) for name, one in (answer or {}).items()}


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, Mapping):
        return packed_values(value)
    return np.array(value, np.int64 if name in _INTEGERS else np.float32)
