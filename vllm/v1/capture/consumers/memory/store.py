# SPDX-License-Identifier: Apache-2.0
"""A bounded store of rows by name."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.v1.capture.errors import fail
from vllm.v1.capture.results import RowsByTap
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.tap import Tap

MOST_UNKEPT = 4096
"""Most names that are remembered because nothing is kept under them."""


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

    def __init__(self, max_bytes: int, evicts: bool = False) -> None:
        """Start empty.

        Args:
            max_bytes: of rows that are held at most.
            evicts: whether a name holds one request, and those not used for longest
                are dropped, whole, for new ones.

        """
        self.max_bytes = max_bytes
        self._evicts = evicts
        self._names: dict[str, KeptName] = {}
        """Those not used for longest come first."""
        self._unkept: dict[str, None] = {}
        """Names of requests whose `keep_when` did not fire, the latest last."""
        self._leases: Counter[str] = Counter()
        self._held = 0
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that still fit."""
        return self.max_bytes - self._held

    @property
    def room(self) -> int:
        """Bytes of rows that fit a new name: free ones, and those that are evicted."""
        with self._lock:
            free = self.free_bytes
            if self._evicts:
                free += sum(self._names[name].num_bytes for name in self._evictable())
            return free

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
            self._make_room(name, rows.nbytes, sidecar["vllm_internal_request_id"])
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
            request.rows.put_all(taps, rows, sidecar)
            kept.num_bytes += rows.nbytes
            self._held += rows.nbytes

    def note_unkept(self, name: str) -> None:
        """Note that a request has ended of which no row is kept."""
        with self._lock:
            self._unkept[name] = self._unkept.pop(name, None)
            if len(self._unkept) > MOST_UNKEPT:
                del self._unkept[next(iter(self._unkept))]

    def why_unknown(self, name: str) -> str:
        """Why there is nothing under a name, if that is known; else empty."""
        if name not in self._unkept:
            return ""
        return " (the keep_when of its request did not fire, so no row of it was kept)"

    def get(self, name: str) -> list[KeptRequest]:
        """The requests of a name, in the order in which they were captured.

        Raises:
            CaptureValidationError: the name is unknown.

        """
        with self._lock:
            self._check(name)
            kept = self._names[name] = self._names.pop(name)  # Used last.
            return list(kept.requests.values())

    @contextmanager
    def lease(self, name: str) -> Iterator[None]:
        """Keep a name from being evicted and replaced; it may still be dropped."""
        with self._lock:
            self._leases[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leases[name] -= 1

    def is_in_use(self, name: str) -> bool:
        """Whether there are rows of a name that has a lease."""
        return name in self._names and self._leases[name] > 0

    def drop(self, name: str) -> dict[str, Any]:
        """Drop a name; rows that a reader still has remain valid.

        Returns:
            Counts and sizes of what was dropped.

        Raises:
            CaptureValidationError: the name is unknown.

        """
        with self._lock:
            self._check(name)
            return self._forget(name).describe()

    def _check(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(sorted(self._names)[:8]) or "none"
            raise fail(
                f"no rows are kept under this name{self.why_unknown(name)}; the names "
                f"are: {known}",
                "name",
                name,
            )

    def _forget(self, name: str) -> KeptName:
        kept = self._names.pop(name)
        self._held -= kept.num_bytes
        return kept

    def _evictable(self, but: str | None = None) -> list[str]:
        return [n for n in self._names if n != but and not self._leases[n]]

    def _make_room(self, name: str, size: int, request_id: str) -> None:
        """Drop what the rows of a request replace, and what is evicted for them."""
        if not self._evicts:
            return
        if name in self._names and request_id not in self._names[name].requests:
            if self.is_in_use(name):
                raise RuntimeError(f"a sweep is using the run {name!r}")
            self._forget(name)
        for other in self._evictable(name):
            if size > self.free_bytes:
                self._forget(other)

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
