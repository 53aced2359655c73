# SPDX-License-Identifier: Apache-2.0
"""A bounded store of rows by name."""

import threading
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.v1.capture.results import RowsByTap
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.tap import Tap


@dataclass(slots=True)
class KeptRequest:
    """The rows of one sample of a request."""

    request_id: str
    """The client's id of the request."""
    sample_index: int
    num_prompt_tokens: int
    rows: RowsByTap = field(default_factory=RowsByTap)


@dataclass(slots=True)
class KeptName:
    """The requests of one name, by the engine's id of each sample."""

    requests: dict[str, KeptRequest] = field(default_factory=dict)
    num_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        """Counts and sizes, as plain data."""
        taps = [tap for one in self.requests.values() for tap in one.rows.values()]
        return {
            "requests": len(self.requests),
            "rows": sum(len(rows) for rows in taps),
            "bytes": self.num_bytes,
        }


class RowStore:
    """Rows by name, up to a maximum size; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` bytes of rows."""
        self.max_bytes = max_bytes
        self._names: dict[str, KeptName] = {}
        self._held = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that still fit."""
        return self.max_bytes - self._held

    def put(
        self,
        name: str,
        taps: Sequence[Tap],
        rows: torch.Tensor,
        sidecar: Mapping[str, Any],
    ) -> None:
        """Add the rows of taps with the same positions.

        Args:
            name: under which they are found.
            taps: of the rows.
            rows: `[taps, rows, hidden_size]` on the CPU; they are kept, not copied.
            sidecar: of the taps' keys.

        Raises:
            RuntimeError: they do not fit; none of them was stored.

        """
        with self._lock:
            if rows.nbytes > self.free_bytes:
                raise RuntimeError(
                    f"{rows.nbytes} bytes of rows do not fit the {self.free_bytes} "
                    f"free of max_bytes={self.max_bytes}; drop names that are no "
                    "longer needed, or raise max_bytes"
                )
            kept = self._names.setdefault(name, KeptName())
            request = kept.requests.setdefault(
                sidecar["vllm_internal_request_id"],
                KeptRequest(
                    sidecar["client_request_id"],
                    sidecar["sample_index"],
                    sidecar["num_prompt_tokens"],
                ),
            )
            facts = {
                "positions": sidecar["positions"],
                "token_ids": sidecar["token_ids"],
                "encoding": None,
            }
            request.rows.put_all(taps, rows, facts)
            kept.num_bytes += rows.nbytes
            self._held += rows.nbytes

    def get(self, name: str) -> list[KeptRequest]:
        """The requests of a name, in the order in which they were captured.

        Raises:
            KeyError: the name is unknown.

        """
        with self._lock:
            return list(self._names[name].requests.values())

    def drop(self, name: str) -> dict[str, Any]:
        """Drop a name; rows that a reader still has remain valid.

        Returns:
            Counts and sizes of what was dropped.

        Raises:
            KeyError: the name is unknown.

        """
        with self._lock:
            kept = self._names.pop(name)
            self._held -= kept.num_bytes
            return kept.describe()

    def describe(self) -> dict[str, Any]:
        """Names, counts and sizes, as plain data."""
        with self._lock:
            return {
                "max_bytes": self.max_bytes,
                "held_bytes": self._held,
                "names": {name: kept.describe() for name, kept in self._names.items()},
            }


def selected(
    rows: RowsByTap,
    layers: Collection[int] | None = None,
    hook: str | None = None,
    start: int = 0,
    stop: int = OPEN_END,
) -> RowsByTap:
    """A part of a request's rows, as views.

    Args:
        rows: of a request.
        layers: 0-based layers; None for all.
        hook: a hook point; None for all.
        start: the first token position.
        stop: the position after the last one.

    """
    found = RowsByTap()
    for tap, tensor in rows.items():
        if (layers is None or tap[0] in layers) and hook in (None, tap[1]):
            facts = rows.facts_of(tap)
            positions = facts["positions"]  # ascending
            part = slice(bisect_left(positions, start), bisect_left(positions, stop))
            facts["positions"] = positions[part]
            facts["token_ids"] = facts["token_ids"][part]
            found.put(tap, tensor[part], facts)
    return found
