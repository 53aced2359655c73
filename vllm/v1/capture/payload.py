# SPDX-License-Identifier: Apache-2.0
"""Payloads of results: rows with their positions, and limits on what can be sent."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm.v1.capture.plan import Tap


class RowsByTap(dict[Tap, torch.Tensor]):
    """`(layer, hook)` -> rows `[rows, hidden_size]` on the CPU.

    `positions[tap]` and `token_ids[tap]` hold one entry per row of the tap. A token id
    is None if the prompt was given as embeddings. Taps with the same positions share
    these lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[Tap, list[int]] = {}
        self.token_ids: dict[Tap, list[int | None]] = {}
        self.encoding: str | None = None
        """Compression in HTTP responses: `"zstd"`, or None for plain base64."""
        self.transport = "http"
        """`"http"`: in the response body. `"shm"`: in memory that the client maps."""

    def put(self, tap: Tap, rows: torch.Tensor, facts: dict[str, Any]) -> None:
        """Add the rows of a tap; `facts` has the form that `facts_of` returns."""
        self[tap] = rows
        self.positions[tap] = _as_list(facts["positions"])
        self.token_ids[tap] = _as_list(facts["token_ids"])
        self.encoding = facts["encoding"]
        self.transport = facts.get("transport", "http")

    def facts_of(self, tap: Tap) -> dict[str, Any]:
        """Everything about a tap except its rows, as plain data."""
        return {
            "positions": self.positions[tap],
            "token_ids": self.token_ids[tap],
            "encoding": self.encoding,
            "transport": self.transport,
        }

    @classmethod
    def united(cls, parts: Iterable["RowsByTap"]) -> "RowsByTap":
        """The union of the parts; their taps must be disjoint."""
        whole = cls()
        for part in parts:
            for tap, rows in part.items():
                whole.put(tap, rows, part.facts_of(tap))
        return whole


def _as_list(values: Sequence[Any]) -> list[Any]:
    """`values` itself if it is a list, so that taps share it."""
    return values if isinstance(values, list) else list(values)


def is_by_tap(payload: Any) -> bool:
    """Whether a payload is a non-empty dict whose keys all are `(layer, hook)`."""
    return (
        isinstance(payload, dict)
        and bool(payload)
        and all(
            isinstance(key, tuple)
            and [type(part) for part in key] == [int, str]
            and -(1 << 63) <= key[0] < 1 << 63
            for key in payload
        )
    )


def sendable(text: str) -> str:
    """`text` with what UTF-8 cannot encode escaped, such as lone surrogates.

    File names that are not UTF-8 hold them (`os.fsdecode`).
    """
    return text.encode(errors="backslashreplace").decode()
