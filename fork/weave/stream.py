# SPDX-License-Identifier: Apache-2.0
"""Symbolic tensors: each is a sum of terms.

The residual stream is a running sum, so a tensor is described by its summands. A term
is a tensor that a call returned or that entered the layer; `Term.reads` has the terms
from which it was computed. Addition joins the terms of both sides, scaling by a number
keeps them, and every other operation makes a new term.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

HIDDEN_NAMES = ("hidden_states", "x", "decoder_hidden_states")
"""Names of the argument with which a layer is given the stream."""


class Role(Enum):
    """The role of a call inside a layer, derived from the callee's name."""

    ENTRY = "entry"
    TAP = "tap"
    STREAM = "the stream so far"
    NORM = "norm"
    MIXER = "token mixer"
    MLP = "MLP"
    BESIDE = "beside both"
    BUFFER = "empty output buffer"
    OTHER = "other"


_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
_MIXER = re.compile(r"attn|attention|mamba|short_?conv|ssm|mixer$", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|ffw|feed_?forward|moe|expert|(^|\.)fc\d|activation_fn", re.IGNORECASE
)
_BUFFER = re.compile(r"(empty|zeros)(_like)?$")


def role_of(name: str) -> Role:
    """The role of a submodule or function by its name; norms take precedence."""
    for pattern, role in (
        (_NORM, Role.NORM),
        (_BUFFER, Role.BUFFER),
        (_MIXER, Role.MIXER),
        (_MLP, Role.MLP),
    ):
        if pattern.search(name):
            return role
    return Role.OTHER


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One summand: the result of one call on one path. Compared by identity."""

    label: str
    role: Role
    reads: frozenset[Term] = frozenset()
    """The terms of all tensors that the call was given."""
    point: str | None = None
    """The hook point, for the result of a tap."""
    part: int = 0
    """For the result of a tap: 0 for the first tensor, 1 for the residual."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The operations applied to a term since it was made."""

    scalings: int = 0
    """How often it was multiplied by a number."""
    reductions: int = 0
    """How often it was summed over the tensor-parallel ranks."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor; in-place operators change it for all names that refer to it."""

    terms: dict[Term, Weight] = field(default_factory=dict)
    split: bool = False
    """Whether it has only this tensor-parallel rank's share of the tokens."""

    @property
    def is_buffer(self) -> bool:
        """Whether the tensor is memory that has not been written yet."""
        return all(term.role is Role.BUFFER for term in self.terms)

    def read(self) -> frozenset[Term]:
        """The terms that a call with this tensor reads; one term for a whole stream."""
        carries = any(t.role in (Role.ENTRY, Role.TAP) for t in self.terms)
        if carries and len(self.terms) > 1:
            return frozenset({Term("the stream", Role.STREAM, frozenset(self.terms))})
        return frozenset(self.terms)

    @staticmethod
    def of(term: Term, split: bool = False) -> Tensor:
        """A tensor with the single term `term`."""
        return Tensor({term: Weight()}, split)

    def copy(self) -> Tensor:
        """The same sum in another buffer."""
        return Tensor(dict(self.terms), self.split)

    def over_ranks(self, split: bool) -> Tensor:
        """The same sum with its tokens split over the ranks, or gathered from them.

        Raises:
            Unprovable: the tokens are split, or gathered, already.
        """
        if self.split == split:
            label = next(iter(self.terms)).label
            state = "split over ranks already" if split else "not split over ranks"
            raise Unprovable(f"the tokens of {label} are {state}")
        return Tensor(dict(self.terms), split)

    def scaled(self) -> Tensor:
        """The same sum times a number."""
        return Tensor(
            {t: Weight(w.scalings + 1, w.reductions) for t, w in self.terms.items()},
            self.split,
        )

    def reduced(self) -> Tensor:
        """The same sum, summed over the tensor-parallel ranks."""
        return Tensor(
            {t: Weight(w.scalings, w.reductions + 1) for t, w in self.terms.items()},
            self.split,
        )

    def plus(self, other: Tensor) -> Tensor:
        """The sum of both tensors.

        Raises:
            Unprovable: they share a term, or only one of them is split over ranks.
        """
        split = split_of((self, other))
        twice = self.terms.keys() & other.terms.keys()
        if twice:
            label = next(iter(twice)).label
            raise Unprovable(f"the same tensor ({label}) is added twice")
        return Tensor({**self.terms, **other.terms}, split)


def split_of(tensors: Iterable[Tensor]) -> bool:
    """Whether `tensors` are split over ranks.

    Raises:
        Unprovable: some are and some are not.
    """
    states = {tensor.split for tensor in tensors if not tensor.is_buffer}
    if len(states) > 1:
        raise Unprovable("a rank's share of the tokens meets a tensor of all tokens")
    return states == {True}


class Unprovable(Exception):
    """The layer does something that the analysis cannot follow, see the message."""


def sublayers(term: Term) -> frozenset[Role]:
    """The nearest sublayers from which a contribution to the stream comes.

    A contribution may be normed, scaled or gated after its sublayer, so the search goes
    back through calls without a role of their own. It stops at the stream.
    """
    if term.role in (Role.MIXER, Role.MLP, Role.BESIDE):
        return frozenset({term.role})
    if term.role in (Role.ENTRY, Role.TAP, Role.STREAM):
        return frozenset()
    return frozenset().union(*map(sublayers, term.reads))


def check_known(terms: Iterable[Term]) -> None:
    """Check that every contribution comes from a sublayer of a known kind.

    Raises:
        Unprovable: the kind of the named sublayer is unknown.
    """
    for term in terms:
        if not sublayers(term):
            raise Unprovable(f"cannot tell what kind of sublayer {term.label} is")


def reached(
    terms: Iterable[Term], ends: Callable[[Term], bool] = lambda term: False
) -> frozenset[Term]:
    """`terms` and those from which they were computed, up to where `ends` is true."""
    found: set[Term] = set()
    pending = list(terms)
    while pending:
        term = pending.pop()
        if term not in found:
            found.add(term)
            pending.extend(() if ends(term) else term.reads)
    return frozenset(found)


def origins(terms: Iterable[Term]) -> frozenset[Term]:
    """The entries and taps from which `terms` were computed; taps end the search."""

    def ends(term: Term) -> bool:
        return term.role in (Role.ENTRY, Role.TAP)

    return frozenset(filter(ends, reached(terms, ends)))
