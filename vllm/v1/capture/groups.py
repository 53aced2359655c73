# SPDX-License-Identifier: Apache-2.0
"""Keys of a request that are handled together, because they have the same positions.

A request that is captured at all layers has a key for each of them. Their rows lie in
one tensor, and their ends differ in layer and hook only. Chunks and finalizes of single
keys are made only for sinks that take these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from msgspec.structs import replace

from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureKey,
    CaptureResult,
    VllmInternalRequestId,
)
from vllm.v1.residual.tap import Tap


class GroupChunk(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """Consecutive rows of a request at all taps of a group.

    It is also what is sent to front ends.
    """

    request_id: VllmInternalRequestId
    taps: tuple[Tap, ...]
    tensor: torch.Tensor
    """`[taps, rows, hidden_size]` on the CPU, in the stream's dtype."""
    row_offset: int
    """The number of rows per tap in earlier chunks."""
    step_index: int
    """The index of the engine step that computed the last of these rows."""
    positions: list[int]
    """The token position of each row; not to be changed."""

    @classmethod
    def of(cls, chunk: CaptureChunk) -> "GroupChunk":
        """The rows of a single key as a group of one."""
        rows, positions = chunk.tensor[None], chunk.metadata.get("positions", [])
        own = chunk.row_offset, chunk.step_index, positions
        return cls(chunk.key[0], (chunk.key[1:],), rows, *own)

    @property
    def keys(self) -> list[CaptureKey]:
        """The key of each tap."""
        return [(self.request_id, *tap) for tap in self.taps]

    def apart(self) -> Iterator["GroupChunk"]:
        """A group of one for each tap."""
        for tap, rows in zip(self.taps, self.tensor.split(1), strict=True):
            yield replace(self, taps=(tap,), tensor=rows)

    def chunks(self) -> Iterator[CaptureChunk]:
        """A chunk for each tap."""
        dtype = self.tensor.dtype
        for key, rows in zip(self.keys, self.tensor.unbind(), strict=True):
            yield CaptureChunk(
                key,
                rows,
                dtype,
                self.row_offset,
                self.step_index,
                {"positions": list(self.positions)},
            )


class GroupEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request's keys at all taps of a group; sent like `GroupChunk`."""

    request_id: VllmInternalRequestId
    taps: tuple[Tap, ...]
    sidecar: dict[str, Any]
    """What the sidecars of these keys share: all fields but `layer` and `hook`."""

    @property
    def keys(self) -> list[CaptureKey]:
        """The key of each tap."""
        return [(self.request_id, *tap) for tap in self.taps]


def chunks_in(items: Iterable[GroupChunk]) -> list[CaptureChunk]:
    """The chunks of single keys, in order."""
    return [chunk for item in items for chunk in item.chunks()]


class GroupSink(ABC):
    """A sink whose work is per group of keys."""

    @abstractmethod
    def submit_rows(self, items: Sequence[GroupChunk]) -> None:
        """Take the rows of a packet."""

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Take rows of one key."""
        self.submit_rows([GroupChunk.of(chunk)])

    @abstractmethod
    def submit_ends(
        self, request_id: str, ends: Sequence[GroupEnd]
    ) -> list[CaptureResult] | None:
        """End a request of which no key has failed.

        Returns:
            A result for each group; None if the request's keys must be ended one by
            one, because their rows came in other groups.

        """


OnGroup: TypeAlias = Callable[[Sequence[Tap], torch.Tensor, dict[str, Any]], Any]
"""`on_group(taps, rows, sidecar)`: what `on_capture` does for each key of a group.

`rows` is `[taps, rows, hidden_size]` on the CPU, in the stream's dtype; `sidecar` has
what the keys' sidecars share, which is all but `layer` and `hook`.
"""
