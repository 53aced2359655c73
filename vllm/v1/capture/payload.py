# SPDX-License-Identifier: Apache-2.0
"""Payloads of results: captured rows that know their positions, and what may travel."""

from collections.abc import Iterable
from typing import Any

import torch

from vllm.v1.capture.plan import Tap


class RowsByTap(dict[Tap, torch.Tensor]):
    """`(layer, hook)` -> rows `[rows, hidden_size]` on the CPU.

    Beside the tensors, per tap: `positions[tap]` and `token_ids[tap]`, one entry
    per row. A token id is None where the prompt was given as embeddings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[Tap, list[int]] = {}
        self.token_ids: dict[Tap, list[int | None]] = {}
        self.encoding: str | None = None
        """How HTTP responses encode the values; None is plain base64."""
        self.transport = "http"
        """How HTTP responses carry them; `"shm"` is memory that the client maps."""

    def put(self, tap: Tap, rows: torch.Tensor, facts: dict[str, Any]) -> None:
        """Add the rows of a tap; `facts` holds what `facts_of` returned for it."""
        self[tap] = rows
        self.positions[tap] = list(facts["positions"])
        self.token_ids[tap] = list(facts["token_ids"])
        self.encoding = facts["encoding"]
        self.transport = facts.get("transport", "http")

    def facts_of(self, tap: Tap) -> dict[str, Any]:
        """Everything but the rows of a tap, as plain data."""
        return {
            "positions": self.positions[tap],
            "token_ids": self.token_ids[tap],
            "encoding": self.encoding,
            "transport": self.transport,
        }

    @classmethod
    def united(cls, parts: Iterable["RowsByTap"]) -> "RowsByTap":
        """The taps of all parts in one."""
        whole = cls()
        for part in parts:
            for tap, rows in part.items():
                whole.put(tap, rows, part.facts_of(tap))
        return whole


def is_by_tap(payload: Any) -> bool:
    """Whether a payload maps `(layer, hook)` to something."""
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


MAX_DEPTH = 64
"""Of lists and objects in one another, in a payload."""


MAX_CONTAINERS = 1 << 17
"""Lists and objects; one that stands at several places counts at each."""


def fault_of(payload: Any) -> str | None:
    """Why a payload cannot travel: too deep, without end, or a number too large.

    Args:
        payload: what a consumer gave; what is not plain data is somebody else's to
            check.

    """
    waiting = [(payload, 0)]
    containers = 0
    while waiting:
        here, depth = waiting.pop()
        if isinstance(here, int) and not -(1 << 63) <= here < 1 << 64:
            return "holds a whole number of more than 64 bits; make it text"
        if isinstance(here, dict):
            inner = [*here.keys(), *here.values()]
        elif isinstance(here, (list, tuple)):
            inner = list(here)
        else:
            continue
        containers += 1
        if containers > MAX_CONTAINERS:
            return f"has more than {MAX_CONTAINERS} lists and objects"
        if depth == MAX_DEPTH:
            return (
                f"is more than {MAX_DEPTH} lists and objects deep, or contains itself"
            )
        # One deeper than the rest of what waits: depth first finds cycles at once.
        waiting += [(one, depth + 1) for one in inner]
    return None


def sendable(text: str) -> str:
    """`text` without what no encoding has, such as a file name's stray bytes."""
    return text.encode(errors="backslashreplace").decode()
