# SPDX-License-Identifier: Apache-2.0
"""What a name holds while a decoder layer runs: a sum of terms.

The residual stream is a running sum, so a tensor is described by the terms it
sums. A term is a tensor that came out of a call or into the layer; what it was
computed from stays known through `Term.reads`. Adding joins the terms of both
sides, scaling by a number keeps them, everything else makes a new term.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """What a call inside a layer is for, told by the name it is called by."""

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
    """The role a submodule's or function's name tells; norms win over the rest."""
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
    """One summand: the result of one call on one path; equal only to itself."""

    label: str
    role: Role
    reads: frozenset[Term] = frozenset()
    """The terms of every tensor the call was given."""
    point: str | None = None
    """The hook point, for the result of a tap."""
    part: int = 0
    """For the result of a tap: 0 for the first tensor, 1 for the residual."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What happened to a term since it was made."""

    scalings: int = 0
    """How often it was multiplied by a number."""
    reductions: int = 0
    """How often it was summed over the tensor-parallel ranks."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor that names refer to; in-place operators change it for all of them."""

    terms: dict[Term, Weight] = field(default_factory=dict)
    split: bool = False
    """Whether it has only this tensor-parallel rank's share of the tokens."""

    @property
    def is_buffer(self) -> bool:
        """Whether it is memory that nothing was written to yet."""
        return all(term.role is Role.BUFFER for term in self.terms)

    def read(self) -> frozenset[Term]:
        """What a call that is given this tensor reads: the terms, or the stream."""
        carries = any(t.role in (Role.ENTRY, Role.TAP) for t in self.terms)
        if carries and len(self.terms) > 1:
            return frozenset({Term("the stream", Role.STREAM, frozenset(self.terms))})
        return frozenset(self.terms)

    @staticmethod
    def of(term: Term, split: bool = False) -> Tensor:
        """A tensor that is just `term`."""
        return Tensor({term: Weight()}, split)

    def copy(self) -> Tensor:
        """The same sum in another buffer."""
        return Tensor(dict(self.terms), self.split)

    def over_ranks(self, split: bool) -> Tensor:
        """The same sum, its tokens split over the ranks, or gathered from them.

        Raises:
            Unprovable: it is split, or whole, already.
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
        """The sum of both.

        Raises:
            Unprovable: a term would count twice, or the tokens differ.
        """
        split = split_of((self, other))
        twice = self.terms.keys() & other.terms.keys()
        if twice:
            label = next(iter(twice)).label
            raise Unprovable(f"the same tensor ({label}) is added twice")
        return Tensor({**self.terms, **other.terms}, split)


def split_of(tensors: Iterable[Tensor]) -> bool:
    """Whether `tensors` have a rank's share of the tokens; all must have the same.

    Raises:
        Unprovable: some have all tokens.
    """
    states = {tensor.split for tensor in tensors if not tensor.is_buffer}
    if len(states) > 1:
        raise Unprovable("a rank's share of the tokens meets a tensor of all tokens")
    return states == {True}


class Unprovable(Exception):
    """The layer does something the analysis cannot follow; the text says what."""


def sublayers(term: Term) -> frozenset[Role]:
    """Which sublayers a contribution comes from: the nearest ones it passed through.

    A contribution may be normed, scaled or gated after its sublayer, so calls
    without a role of their own are looked through. Looking stops at the stream.
    """
    if term.role in (Role.MIXER, Role.MLP, Role.BESIDE):
        return frozenset({term.role})
    if term.role in (Role.ENTRY, Role.TAP, Role.STREAM):
        return frozenset()
    return frozenset().union(*map(sublayers, term.reads))


def check_known(terms: Iterable[Term]) -> None:
    """Every contribution must come from a sublayer whose kind is known.

    Raises:
        Unprovable: naming one that does not.
    """
    for term in terms:
        if not sublayers(term):
            raise Unprovable(f"cannot tell what kind of sublayer {term.label} is")


def origins(terms: frozenset[Term]) -> frozenset[Term]:
    """The entries and taps that `terms` were computed from, taps not looked through."""
    found: set[Term] = set()
    pending, seen = list(terms), set(terms)
    while pending:
        term = pending.pop()
        if term.role in (Role.ENTRY, Role.TAP):
            found.add(term)
            continue
        fresh = term.reads - seen
        seen |= fresh
        pending.extend(fresh)
    return frozenset(found)
