# SPDX-License-Identifier: Apache-2.0
"""Operations on the residual stream other than plain addition of a vector.

These records are sent to the engine core and the workers; `docs/steering/semantics.md`
has the formulas. This module imports neither torch nor the rest of steering, because
`vllm.sampling_params` imports it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from vllm.v1.residual.spans import Spans, absolute, last_of, selected
from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.features import FeatureUse

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
"""All operations, in the order in which one hook point applies them."""


class Details(msgspec.Struct, frozen=True, array_like=True):
    """The fields that only some operations use."""

    strength: float = 1.0
    """`clamp`: the fraction of the distance to the bounds that is moved, 1 for all."""
    alpha: float = 1.0
    """`replace`: the weight of the vector in the result, 1 for all."""
    degrees: float = 0.0
    """`rotate`: the angle."""
    activation: str = "identity"
    """`low_rank`: the function applied to what is read."""
    arrays: tuple[tuple[str, bytes], ...] = ()
    """Further arrays as float32 bytes, by name: `target`, `mask`, `write`, `bias`,
    `threshold`."""
    when: Condition | None = None
    """If set, the operation acts only where this condition fires."""
    feature: FeatureUse | None = None
    """`feature`: the feature and its change; this operation has no vector of its
    own."""

    def array(self, name: str) -> npt.NDArray[np.float32] | None:
        """The named array, flat float32; None if there is none of this name."""
        data = dict(self.arrays).get(name)
        return None if data is None else np.frombuffer(data, dtype=np.float32)


NO_DETAILS = Details()


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation at one hook point of one layer."""

    layer: int
    hook: str
    op: OpName
    data: bytes
    """The vector as given: float32 `[hidden_size]`; `[2, hidden_size]` for the plane of
    `rotate`, `[rank, hidden_size]` for the rows that `low_rank` reads."""
    scale: float
    low: float | None
    high: float | None
    norm_match: bool
    """Whether `scale` is a multiple of the stream's norm at the token."""
    positions: Spans | None
    """Token positions; negative ones count from the prompt's end. None: every token."""
    content: str
    """SHA-256 of everything but the place and the positions."""
    details: Details = NO_DETAILS
    num_rows: int = 0
    """Number of rows in `data`, in the order of the positions, if each position has a
    vector of its own. 0: one vector for all positions."""

    @property
    def digest(self) -> str:
        """Equal, in every process, for operations that differ in positions only."""
        return f"{self.content}@{self.layer}.{self.hook}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the operation's vectors, in float32."""
        return len(self.data) + sum(len(data) for _, data in self.details.arrays)

    @property
    def tap(self) -> tuple[int, str]:
        """The `(layer, hook)` at which the operation acts."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """The vector `[hidden_size]`, or all rows flat; a float32 view of `data`."""
        return np.frombuffer(self.data, dtype=np.float32)

    def last(self, num_prompt: int) -> int:
        """The last position on which the operation acts; it must have positions."""
        assert self.positions is not None, "without positions none is the last"
        return last_of(self.positions, num_prompt)

    def ranges(self, num_prompt: int, start: int, stop: int) -> list[range]:
        """The positions in `[start, stop)` on which it acts; ranges may overlap."""
        if self.positions is None:
            return [range(start, stop)]
        return list(absolute(self.positions, num_prompt, start, stop))

    def selected(self, num_prompt: int, start: int, stop: int) -> list[int]:
        """The positions in `[start, stop)` on which it acts, ascending."""
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
    """Create an operation and compute the digest of its content."""
    data = vector.astype("<f4", copy=False).tobytes()
    # Encoded, because the text of an array's bytes takes longer than all the rest.
    what = (op, scale, bounds, norm_match, details, num_rows)
    content = hashlib.sha256(msgspec.msgpack.encode(what))
    content.update(data)
    return Operation(
        *tap,
        op,
        data,
        scale,
        *bounds,
        norm_match,
        positions,
        content.hexdigest(),
        details,
        num_rows,
    )


def on_prompt(one: Operation) -> Operation:
    """The operation, with its condition (of scope `rest`) decided in the prompt too."""
    when = one.details.when
    assert when is not None, "the operation has no condition"
    if when.in_prompt:
        return one
    details = structs.replace(one.details, when=structs.replace(when, in_prompt=True))
    content = hashlib.sha256(f"in the prompt {one.content}".encode()).hexdigest()
    return structs.replace(one, details=details, content=content)


def packed_arrays(
    arrays: Mapping[str, npt.NDArray[np.float32]],
) -> tuple[tuple[str, bytes], ...]:
    """Arrays as named float32 bytes, in the form of `Details.arrays`."""
    return tuple((name, one.astype("<f4").tobytes()) for name, one in arrays.items())


def place_of(one: Operation) -> int:
    """The operation's rank in the order in which one hook point applies kinds."""
    return OP_NAMES.index(one.op)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations in the order in which one hook point applies them.

    Operations of one kind keep their order: engine before request, base before phase,
    then as written.
    """
    return tuple(sorted(operations, key=place_of))
