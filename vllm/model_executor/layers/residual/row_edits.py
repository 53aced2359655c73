# SPDX-License-Identifier: Apache-2.0
"""Changes of single rows of the stream that depend on the stream itself.

They are carried out by passes that are neither compiled nor recorded. All arithmetic
is float32; the result is rounded once, to the stream's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowEdit:
    """One operation on some rows of a step.

    With v the vector, u = v / |v|, s the scale and x a row of the stream:

    - `replace`: x becomes s v, or s |x| u with `norm_match`;
    - `add`: x + s v, or x + s |x| u with `norm_match`;
    - `project_out`: x - s (x . u) u;
    - `clamp`: x + (min(max(c, low), high) - c) u, where c = x . u.
    """

    rows: torch.Tensor  # [n], int64
    op: str
    vector: torch.Tensor  # [H], float32
    scale: float
    low: float | None
    high: float | None
    norm_match: bool

    @property
    def direction(self) -> torch.Tensor:
        """U."""
        return self.vector / self.vector.norm()


def edited_rows(edits: Sequence[RowEdit]) -> torch.Tensor:
    """The rows that any edit changes, ascending `[m]`."""
    return torch.unique(torch.cat([edit.rows for edit in edits]))


def apply_edits(
    edits: Sequence[RowEdit],
    rows: torch.Tensor,  # [m], what `edited_rows` gives
    stream: torch.Tensor,  # [m, H], float32: the stream at these rows
    added: torch.Tensor,  # [m, H]: what is added to them anyway
) -> torch.Tensor:
    """The stream at `rows` after all edits, which are given in their order.

    Norms that additions are matched to are those before any addition.
    """
    stream = stream.clone()
    where = [torch.searchsorted(rows, edit.rows) for edit in edits]
    kinds = [edit.op for edit in edits]
    for edit, index in zip(edits, where, strict=True):
        if edit.op == "replace":
            stream[index] = _vectors(edit, stream[index])
    before = stream.clone()
    stream += added
    for edit, index in zip(edits, where, strict=True):
        if edit.op == "add":
            stream[index] += _vectors(edit, before[index])
    assert set(kinds) <= {"replace", "add", "project_out", "clamp"}, kinds
    for edit, index in zip(edits, where, strict=True):
        if edit.op in ("project_out", "clamp"):
            stream[index] += _along(edit, stream[index] @ edit.direction)
    return stream


def _vectors(edit: RowEdit, stream: torch.Tensor) -> torch.Tensor:
    """What `replace` and `add` bring in, for each row `[n, H]`."""
    if not edit.norm_match:
        return (edit.scale * edit.vector).expand_as(stream)
    lengths = stream.norm(dim=-1, keepdim=True)
    return edit.scale * lengths * edit.direction


def _along(edit: RowEdit, coefficients: torch.Tensor) -> torch.Tensor:
    """What changes coefficients `[n]` along the direction, for each row `[n, H]`."""
    if edit.op == "project_out":
        change = -edit.scale * coefficients
    else:
        change = coefficients.clamp(edit.low, edit.high) - coefficients
    return change[:, None] * edit.direction
