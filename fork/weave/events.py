# SPDX-License-Identifier: Apache-2.0
"""The trace of one path through a layer: values and events."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from .stream import Tensor, Term


class NoTensor:
    """Python's `None`, as opposed to a value that is not tracked."""


NONE = NoTensor()
Value = Tensor | NoTensor | None
"""A tracked tensor, Python's `None` (`NONE`), or (None) an untracked value."""
Holding = tuple[tuple[str, Tensor], ...]
"""Every name and a copy of its tensor."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the placement or the proof examines, in order of execution."""

    kind: str
    """The kind of the event:

    - `fused`: an add-norm is about to run on `tensors`;
    - `add`: `names[0]` now refers to a sum;
    - `made`: `names[0]` now refers to the result of a sublayer;
    - `sum`: an expression adds two tensors;
    - `mlp`: an MLP is called on `tensors`;
    - `tap`: a hook point on `tensors`;
    - `value`: a hook point on a tensor beside the stream;
    - `return`: the layer returns `tensors`.
    """
    statement: cst.CSTNode
    names: tuple[str, ...]
    tensors: tuple[Tensor | None, ...]
    label: str = ""
    """The callee of a fused add-norm; the method and point of a tap."""
    holding: Holding = ()
    """For `add` before its statement, for `made` after it."""
    node: cst.CSTNode | None = None
    """For `mlp`: the call; for `sum` and `return`: the expression or statement."""

    def held(self) -> frozenset[Term]:
        """The terms of all its tensors."""
        return frozenset(t for tensor in self.tensors if tensor for t in tensor.terms)


@dataclass
class Trace:
    """One path through a layer's forward, from entry to return."""

    entry: tuple[Tensor, ...]
    events: list[Event] = field(default_factory=list)
