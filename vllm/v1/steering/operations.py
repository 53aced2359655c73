# SPDX-License-Identifier: Apache-2.0
"""What can be done to the stream beyond adding a vector: the form that travels.

`docs/steering-semantics.md` has the formulas. This module imports neither torch nor
the rest of steering, because `vllm.sampling_params` imports it.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.v1.steering.positions import Spans, last_of, selected

OpName: TypeAlias = Literal["add", "project_out", "clamp", "replace"]

OP_NAMES: tuple[OpName, ...] = ("replace", "add", "project_out", "clamp")
"""In the order in which they are carried out at one hook point."""


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation at one hook point of one layer."""

    layer: int
    hook: str
    op: OpName
    data: bytes
    """The vector as given: float32 `[hidden_size]`."""
    scale: float
    low: float | None
    high: float | None
    norm_match: bool
    """Whether `scale` counts in norms of the stream."""
    positions: Spans | None
    """Token positions, negative ones from the prompt's end; None for all."""
    digest: str
    """SHA-256 of what it does, without where in the sequence."""

    @property
    def tap(self) -> tuple[int, str]:
        """Where it acts."""
        return self.layer, self.hook

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """`[hidden_size]`, a view of the data."""
        return np.frombuffer(self.data, dtype=np.float32)

    def last(self, num_prompt: int) -> int:
        """The last position that it names; without positions none is the last."""
        assert self.positions is not None, "it acts everywhere"
        return last_of(self.positions, num_prompt)

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
) -> Operation:
    """An operation with its digest."""
    data = vector.astype("<f4").tobytes()
    what = repr((tap, op, scale, bounds, norm_match)).encode()
    digest = hashlib.sha256(what + data).hexdigest()
    return Operation(*tap, op, data, scale, *bounds, norm_match, positions, digest)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations in the order in which one hook point carries them out.

    Those of one kind keep their order: engine before request, base before phase,
    then as written.
    """
    return tuple(sorted(operations, key=lambda one: OP_NAMES.index(one.op)))
