# SPDX-License-Identifier: Apache-2.0
"""Captured rows with their positions and tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
from clearbox_client import notebook
from clearbox_client.payloads import entry_stored, widened
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rows:
    """The rows of one layer at one hook point."""

    layer: int
    hook: str
    stored: NDArray[Any]
    """`[rows, hidden_size]` as they were sent; bfloat16 as `uint16` with its bits.

    A view of the whole response, which stays in memory as long as any of its rows; copy
    the few that you keep."""
    dtype: str
    """The dtype in which the model computed them."""
    positions: list[int]
    token_ids: list[int | None]
    """None where the prompt was given as embeddings."""
    tokens: list[str] | None = None
    """The texts of the tokens, if they were requested."""
    heads: tuple[int, ...] = ()
    """The heads of which a row consists, in this order; empty if it is whole."""

    @cached_property
    def values(self) -> NDArray[Any]:
        """The numbers, `[rows, hidden_size]`; bfloat16 is widened to float32."""
        return widened(self.stored, self.dtype)

    def __len__(self) -> int:
        return len(self.stored)

    def __repr__(self) -> str:
        shape = list(self.stored.shape)
        heads = f", heads {list(self.heads)}" if self.heads else ""
        return f"Rows(layer {self.layer}, {self.hook}{heads}, {shape} {self.dtype})"

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return np.asarray(self.values, dtype)

    @property
    def norms(self) -> NDArray[Any]:
        """The Euclidean norm of each row, `[rows]`."""
        norms: NDArray[Any] = np.linalg.norm(self.values.astype(np.float64), axis=-1)
        return norms

    def at(self, position: int) -> NDArray[Any]:
        """The row of a token position, `[hidden_size]`.

        Raises:
            KeyError: the position was not captured.

        """
        try:
            found: NDArray[Any] = self.values[self.positions.index(position)]
        except ValueError:
            message = f"position {position} was not captured; {self.positions} were"
            raise KeyError(message) from None
        return found

    def _repr_html_(self) -> str:
        return notebook.table_of(self)


class RowSet(Mapping[tuple[int, str], Rows]):
    """The rows of a response, by `(layer, hook)`."""

    def __init__(self, rows: Mapping[tuple[int, str], Rows]) -> None:
        """Hold rows."""
        self._rows = dict(sorted(rows.items()))

    @classmethod
    def of(
        cls, payload: Sequence[Mapping[str, Any]], tokens: Sequence[str] | None = None
    ) -> "RowSet":
        """Parse a payload; `tokens` are the texts of prompt and generated tokens."""
        found = {}
        for entry in payload:
            positions = [index(one) for one in entry["positions"]]
            stored = entry_stored(entry)
            if len(stored) != len(positions):
                raise ValueError(f"{len(positions)} positions of {len(stored)} rows")
            known = tokens is not None and max(positions, default=-1) < len(tokens)
            layer, hook = index(entry["layer"]), str(entry["hook"])
            found[layer, hook] = Rows(
                layer=layer,
                hook=hook,
                stored=stored,
                dtype=entry["dtype"],
                positions=positions,
                token_ids=list(entry.get("token_ids") or [None] * len(positions)),
                tokens=[tokens[p] for p in positions] if tokens and known else None,
                heads=tuple(index(head) for head in entry.get("heads", ())),
            )
        return cls(found)

    def __getitem__(self, tap: tuple[int, str]) -> Rows:
        if tap not in self._rows:
            raise KeyError(f"{tap!r} is not in {self!r}")
        return self._rows[tap]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"RowSet({list(self._rows.values())})"

    def stacked(self, hook: str = "post_block") -> NDArray[Any]:
        """The rows of all layers at a hook point, `[layers, rows, hidden_size]`."""
        return np.stack([one.values for one in self.values() if one.hook == hook])

    def _repr_html_(self) -> str:
        return notebook.heat_map_of(self)
