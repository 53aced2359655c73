# SPDX-License-Identifier: Apache-2.0
"""Instructions of operations, and their vectors on the device."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.program import (
    Activation,
    Flag,
    Instruction,
    Kind,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation, Vector
from vllm.v1.steering.worker.features import (
    SAEs,
    carried_instruction,
    feature_instruction,
)

FIRST_ROW = 0
"""Placeholder for the row offset of instructions with one row per position."""


class Vectors:
    """The distinct vectors of a phase, uploaded in one copy."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._numbers: dict[bytes, int] = {}
        self._rows: list[npt.NDArray[np.float32]] = []  # [rows, H] each
        self._count = 0

    def add(self, vector: Vector) -> int:
        """Add a vector `[H]`; returns its row in the upload."""
        data = vector.tobytes()
        if data not in self._numbers:
            self._numbers[data] = self.add_rows(vector[None])
        return self._numbers[data]

    def add_rows(self, rows: npt.NDArray[np.float32]) -> int:
        """Add several rows `[n, H]`, which stay contiguous; returns the first's row."""
        first = self._count
        self._rows.append(rows)
        self._count += len(rows)
        return first

    def upload(self, device: torch.device) -> torch.Tensor:
        """Upload all vectors, float32 `[vectors, H]`."""
        if not self._rows:
            return torch.empty(0, 0, device=device)
        return async_tensor_h2d(np.concatenate(self._rows), device, torch.float32)


Draft = Callable[[torch.Tensor], Instruction]
"""Makes an instruction from the uploaded vectors."""


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Vectors `[..., H]` normalized to length 1, in double precision."""
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide / norms).astype(np.float32)


def draft_sum(vector: Vector, vectors: Vectors) -> Draft:
    """Draft the addition of a vector as given."""
    at = vectors.add(vector)
    return lambda table: Instruction(Kind.LINEAR, table[at : at + 1], c0=1.0)


def _draft(one: Operation, vectors: Vectors) -> Draft:
    """Draft the instruction of an operation."""
    if one.op in _OTHERS:
        return _OTHERS[one.op](one, vectors)
    directed = one.norm_match or one.op in ("project_out", "clamp")
    rows = one.vector.reshape(-1, vectors.width)
    rows = _unit(rows) if directed else rows
    mask = one.details.array("mask")
    masked = None if mask is None else vectors.add(mask)
    at = vectors.add_rows(rows) if one.num_rows else vectors.add(rows[0])
    stop = at + len(rows)
    offset = FIRST_ROW if one.num_rows else None
    low = -np.inf if one.low is None else one.low
    high = np.inf if one.high is None else one.high
    plain, matched = (0.0, one.scale) if one.norm_match else (one.scale, 0.0)

    def make(table: torch.Tensor) -> Instruction:
        read = table[at:stop]
        if one.op == "project_out":
            return Instruction(
                Kind.LINEAR, read, flags=Flag.DOT, c2=-one.scale, offset=offset
            )
        if one.op == "clamp":
            return Instruction(
                Kind.LINEAR,
                read,
                flags=Flag.DOT,
                c3=one.details.strength,
                low=low,
                high=high,
                offset=offset,
            )
        if one.op == "replace":
            return Instruction(
                Kind.REPLACE,
                read,
                flags=Flag.SAVE_NORM if one.norm_match else Flag.NONE,
                c0=plain,
                c1=matched,
                alpha=one.details.alpha,
                mask=None if masked is None else table[masked],
                offset=offset,
            )
        return Instruction(Kind.LINEAR, read, c0=plain, c1=matched, offset=offset)

    return make


def _draft_swap(one: Operation, vectors: Vectors) -> Draft:
    target = one.details.array("target")
    assert target is not None
    read, wanted = _unit(one.vector), _unit(target)
    at, to = vectors.add(read), vectors.add(wanted - read)
    return lambda table: Instruction(
        Kind.LINEAR,
        table[at : at + 1],
        write=table[to : to + 1],
        flags=Flag.DOT,
        c2=1.0,
    )


def _draft_rotate(one: Operation, vectors: Vectors) -> Draft:
    first, second = one.vector.reshape(2, -1)
    at, to = vectors.add(first), vectors.add(second)
    angle = np.deg2rad(one.details.degrees)
    return lambda table: Instruction(
        Kind.ROTATE,
        table[at : at + 1],
        write=table[to : to + 1],
        c0=float(np.cos(angle)),
        c1=float(np.sin(angle)),
    )


def _draft_low_rank(one: Operation, vectors: Vectors) -> Draft:
    details = one.details
    write = details.array("write")
    assert write is not None
    bias, threshold = details.array("bias"), details.array("threshold")
    width = vectors.width
    at = vectors.add_rows(one.vector.reshape(-1, width))
    to = vectors.add_rows(write.reshape(-1, width))
    rank = len(write) // width

    def make(table: torch.Tensor) -> Instruction:
        def numbers(found: Vector | None) -> torch.Tensor | None:
            if found is None:
                return None
            return async_tensor_h2d(found.copy(), table.device, torch.float32)

        return Instruction(
            Kind.LOW_RANK,
            table[at : at + rank],
            write=table[to : to + rank],
            c1=one.scale,
            low=-np.inf if one.low is None else one.low,
            high=np.inf if one.high is None else one.high,
            activation=Activation[details.activation.upper()],
            bias=numbers(bias),
            threshold=numbers(threshold),
        )

    return make


_OTHERS: dict[str, Callable[[Operation, Vectors], Draft]] = {
    "swap": _draft_swap,
    "rotate": _draft_rotate,
    "low_rank": _draft_low_rank,
}


class Kept:
    """An instruction and its vectors on the device, alive while a phase uses it."""

    __slots__ = ("__weakref__", "carried", "instruction")

    def __init__(
        self, instruction: Instruction, carried: Instruction | None = None
    ) -> None:
        self.instruction = instruction
        self.carried = carried
        """Stores the value that the instruction needs from an earlier hook point."""


class Bank:
    """The vectors of operations on the device, without duplicates.

    Both phases of a configuration share its base operations, and all configurations
    share the engine's. Memory of the configured size is reserved while the engine
    measures how much is free.
    """

    def __init__(
        self,
        width_at: Callable[[Tap], int],
        device: torch.device,
        num_bytes: int,
        saes: SAEs,
    ) -> None:
        """Reserve `num_bytes` on the device; `width_at` has each hook point's width."""
        self._width_at = width_at
        self._saes = saes
        self._device = device
        self._kept: WeakValueDictionary[str, Kept] = WeakValueDictionary()
        self._reserved: torch.Tensor | None = torch.empty(
            num_bytes, dtype=torch.uint8, device=device
        )
        self.num_bytes = num_bytes
        """Bytes that the vectors may take, part of the model's memory."""

    def fetch(self, operations: Sequence[Operation]) -> list[Kept]:
        """The operations' instructions; missing vectors are uploaded in one copy."""
        self._reserved = None  # The vectors use the reserved memory.
        found = {one.digest: self._kept.get(one.digest) for one in operations}
        missing = {one.digest: one for one in operations if found[one.digest] is None}
        widths = {digest: self._width_at(one.tap) for digest, one in missing.items()}
        vectors = {width: Vectors(width) for width in widths.values()}
        drafts = {
            digest: self._drafted(one, vectors[widths[digest]])
            for digest, one in missing.items()
        }
        tables = {width: one.upload(self._device) for width, one in vectors.items()}
        made = {
            digest: Kept(
                draft(tables[widths[digest]]),
                carried_instruction(missing[digest], self._saes),
            )
            for digest, draft in drafts.items()
        }
        self._kept.update(made)
        return [found[one.digest] or made[one.digest] for one in operations]

    def _drafted(self, one: Operation, vectors: Vectors) -> Draft:
        if one.details.feature is None:
            return _draft(one, vectors)
        made = feature_instruction(one, self._saes)
        return lambda table: made
