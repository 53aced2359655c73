# SPDX-License-Identifier: Apache-2.0
"""What can be done to the stream beyond adding a vector: the form that travels.

`docs/steering-semantics.md` has the formulas. This module imports neither torch nor
the rest of steering, because `vllm.sampling_params` imports it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.positions import Spans, absolute, last_of, selected

OpName: TypeAlias = Literal[
    "replace", "add", "project_out", "swap", "rotate", "low_rank", "feature", "clamp"
]

OP_NAMES: tuple[OpName, ...] = (
    "replace",
    "add",
    "project_out",
    "swap",
    "rotate",
    "low_rank",
    "feature",
    "clamp",
)
"""In the order in which they are carried out at one hook point."""


class Details(msgspec.Struct, frozen=True, array_like=True):
    """What only some operations have."""

    strength: float = 1.0
    """Of a clamp: how far the way to its bounds."""
    alpha: float = 1.0
    """Of a replacement: the share of the vector in the result."""
    degrees: float = 0.0
    """Of a rotation."""
    activation: str = "identity"
    """Of `low_rank`."""
    arrays: tuple[tuple[str, bytes], ...] = ()
    """float32, by name: `target`, `mask`, `write`, `bias`, `threshold`."""
    when: Condition | None = None
    """If set, it acts where this is met."""
    feature: FeatureUse | None = None
    """Of `feature`, which has no vector of its own."""

    def array(self, name: str) -> npt.NDArray[np.float32] | None:
        """An array, flat; None if there is none of this name."""
        data = dict(self.arrays).get(name)
        return None if data is None else np.frombuffer(data, dtype=np.float32)


NO_DETAILS = Details()


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation at one hook point of one layer."""

    layer: int
    hook: str
    op: OpName
    data: bytes
    """The vector as given: float32 `[hidden_size]`; `[2, hidden_size]` for a plane, and
    `[rank, hidden_size]` for what `low_rank` reads."""
    scale: float
    low: float | None
    high: float | None
    norm_match: bool
    """Whether `scale` counts in norms of the stream."""
    positions: Spans | None
    """Token positions, negative ones from the prompt's end; None for all."""
    digest: str
    """SHA-256 of what it does, without where in the sequence."""
    details: Details = NO_DETAILS
    num_rows: int = 0
    """Where each position has a vector of its own: how many rows `data` holds, in the
    order of the positions. 0: one vector, at all positions."""

    @property
    def num_bytes(self) -> int:
        """Of its vectors, in float32."""
        return len(self.data) + sum(len(data) for _, data in self.details.arrays)

    @property
    def tap(self) -> tuple[int, str]:
        """Where it acts."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """`[hidden_size]`, or all rows flat; a view of the data."""
        return np.frombuffer(self.data, dtype=np.float32)

    def last(self, num_prompt: int) -> int:
        """The last position that it names; without positions none is the last."""
        assert self.positions is not None, "it acts everywhere"
        return last_of(self.positions, num_prompt)

    def ranges(self, num_prompt: int, start: int, stop: int) -> list[range]:
        """The positions in `[start, stop)` that it acts on; they may overlap."""
        if self.positions is None:
            return [range(start, stop)]
        return list(absolute(self.positions, num_prompt, start, stop))

    def selected(self, num_prompt: int, start: int, stop: int) -> list[int]:
        """The positions in `[start, stop)` that it acts on, ascending."""
        if self.positions is None:
            return list(range(start, stop))
        return selected(self.positions, num_prompt, start, stop)


def operation(
    tap: tuple[int, str],
    op: OpName,
    vector: npt.NDArray[np.float32],
    scale: float,
    bounds: tuple[float | None, float | None],
    norm_match: bool,
    positions: Spans | None,
    details: Details = NO_DETAILS,
    num_rows: int = 0,
) -> Operation:
    """An operation with its digest."""
    data = vector.astype("<f4").tobytes()
    what = repr((tap, op, scale, bounds, norm_match, details, num_rows))
    digest = hashlib.sha256(what.encode())
    digest.update(data)
    return Operation(
        *tap,
        op,
        data,
        scale,
        *bounds,
        norm_match,
        positions,
        digest.hexdigest(),
        details,
        num_rows,
    )


def packed_arrays(
    arrays: Mapping[str, npt.NDArray[np.float32]],
) -> tuple[tuple[str, bytes], ...]:
    """Arrays in the form that travels."""
    return tuple((name, one.astype("<f4").tobytes()) for name, one in arrays.items())


def place_of(one: Operation) -> int:
    """Its place among the kinds that one hook point carries out."""
    return OP_NAMES.index(one.op)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations in the order in which one hook point carries them out.

    Those of one kind keep their order: engine before request, base before phase,
    then as written.
    """
    return tuple(sorted(operations, key=place_of))
