# SPDX-License-Identifier: Apache-2.0
"""What a scheduler output carries for captures, to the workers.

The engine core decides what the activation store holds, and the workers carry it out in
the order of the changes, so that neither has to ask the other. A block is the tokens of
one hash of the prefix cache; what is stored of it are the rows of all its tokens at the
taps of a group, under a number that is never used again.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from vllm.v1.residual.capture_plan import CaptureEnd

Place: TypeAlias = tuple[int, int, int]
"""The index of a block in a request, the index of a group in its plan, and the number
of what is stored."""


class KeepRows(NamedTuple):
    """A request that begins computes these blocks; their rows are stored."""

    request_id: str
    size: int
    """Tokens of a block."""
    places: Sequence[Place]


class LoadRows(NamedTuple):
    """A request begins with cached blocks, whose rows are stored."""

    request_id: str
    size: int
    """Tokens of a block."""
    start: int
    """The first position without a row from the forward pass."""
    stop: int
    """The position after the last one."""
    places: Sequence[Place]


class MoveRows(NamedTuple):
    """What is stored under this number goes to the disk, or is dropped."""

    number: int
    to: Literal["disk", "nowhere"]


StoreChange: TypeAlias = KeepRows | LoadRows | MoveRows


class CaptureStep(NamedTuple):
    """What a step has beside its requests."""

    ends: Sequence[CaptureEnd]
    """Of requests that have finished for their clients."""
    reforwarded: int
    """Cached tokens that are recomputed because their rows are captured."""
    stored: Sequence[StoreChange]
    """Changes of the activation store, in order."""
