# SPDX-License-Identifier: Apache-2.0
"""What happens on one path through a layer: values, events and their trace."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from .stream import Tensor, Term


class NoTensor:
    """The value `None`, told apart from a value that is not followed."""


NONE = NoTensor()
Value = Tensor | NoTensor | None
"""A followed tensor, Python's None, or (None) something not followed."""
Holding = tuple[tuple[str, Tensor], ...]
"""Every name and a copy of what it holds."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something the placement or the proof looks at, in order of execution."""

    kind: str
    """`fused`: an add-norm about to run on `tensors`; `add`: `names[0]` now holds
    a sum; `made`: `names[0]` now holds the result of a sublayer; `mlp`: an MLP is
    called on `tensors`; `tap`: a hook point on `tensors`; `value`: one beside the
    stream; `return`: `tensors` leave the layer."""
    statement: cst.CSTNode
    names: tuple[str, ...]
    tensors: tuple[Tensor | None, ...]
    label: str = ""
    """The callee of a fused add-norm; the method and point of a tap."""
    holding: Holding = ()
    """For `add` before its statement, for `made` behind it."""
    node: cst.CSTNode | None = None
    """For `mlp`: the call."""

    def held(self) -> frozenset[Term]:
        """The terms of all its tensors."""
        return frozenset(t for tensor in self.tensors if tensor for t in tensor.terms)


@dataclass
class Trace:
    """One path through a layer's forward, from entry to return."""

    entry: tuple[Tensor, ...]
    events: list[Event] = field(default_factory=list)
