# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder layer's `forward` on toy numbers, without torch or weights.

A tensor is one number, which in-place operators change for all references. Norms are
the identity, token mixers and MLPs are nonlinear, and every other attribute of a layer
is a factor of one and a false condition. So an intervention at a hook point can be
compared with the same change at its source.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from fork.weave.stream import HIDDEN_NAMES, Role, role_of

TOKENS, SHARE = 2, 1
"""Number of rows of a tensor, and of a rank's share."""


class Toy:
    """A tensor of one number, for all tokens or a rank's share of them."""

    dtype = "float32"

    def __init__(
        self, number: float, is_buffer: bool = False, split: bool = False
    ) -> None:
        self.number = number
        self.is_buffer = is_buffer
        self.split = split

    @property
    def shape(self) -> tuple[int, int]:
        return (SHARE if self.split else TOKENS, 1)

    def made(self, number: float) -> Toy:
        """Create another tensor of the same tokens."""
        return Toy(number, split=self.split)

    def over_ranks(self, split: bool) -> Toy:
        """The same number, after an all-gather or a split over ranks."""
        assert self.split != split, "split twice, or gathered from whole tensors"
        return Toy(self.number, split=split)

    def __iter__(self) -> Iterator[Toy]:
        """Unpacks as (output, bias), like upstream's linear layers."""
        return iter((self, Toy(0.0)))

    def __add__(self, other: Any) -> Toy:
        assert not isinstance(other, Toy) or self.split == other.split
        return self.made(self.number + _number(other, 0.0))

    __radd__ = __add__

    def __iadd__(self, other: Any) -> Toy:
        self.number += _number(other, 0.0)
        return self

    def __mul__(self, other: Any) -> Toy:
        return self.made(self.number * _number(other, 1.0))

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Toy:
        self.number *= _number(other, 1.0)
        return self

    def __getitem__(self, index: object) -> Toy:
        return self

    def clone(self) -> Toy:
        return self.made(self.number)

    def to(self, *_: object) -> Toy:
        return self

    def dim(self) -> int:
        return 2


def _number(value: Any, neutral: float) -> float:
    if isinstance(value, Toy):
        return value.number
    return value if isinstance(value, int | float) else neutral


class Neutral:
    """Any other object: a condition, a factor of one, a function of no effect."""

    def __init__(self, truth: bool = False) -> None:
        self.truth_ = truth

    def __bool__(self) -> bool:
        return self.truth_

    def __getattr__(self, name: str) -> Neutral:
        return Neutral(self.truth_)

    def __getitem__(self, index: object) -> Neutral:
        return Neutral(self.truth_)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next((a for a in (*args, *kwargs.values()) if isinstance(a, Toy)), self)

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, Toy) else self

    __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __add__
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __neg__ = __add__

    def __eq__(self, other: object) -> bool:
        """Compares as the flags determine, for conditions on a layer's kind."""
        return other == ("linear_attention" if self.truth_ else "full_attention")

    def __hash__(self) -> int:
        return id(self)

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class Torch(Neutral):
    """The `torch` of the toy layers."""

    def empty_like(self, other: Toy) -> Toy:
        return Toy(0.0, is_buffer=True)

    zeros_like = empty_like


class Globals(dict[str, Any]):
    """The globals of a module; undefined names are neutral."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Neutral()


class Taps:
    """The `residual_tap` of the toy layers: records the stream, then changes it.

    With `replaces` the whole stream is returned in the first tensor, as by clamping.
    """

    def __init__(
        self, change: dict[str, float] | None = None, replaces: bool = False
    ) -> None:
        self.change = change or {}
        self.replaces = replaces
        self.seen: dict[str, float] = {}
        """The stream at each point, before the change."""
        self.paired: dict[str, bool] = {}

    def tapped(self, *points: str) -> Callable[[type], type]:
        return lambda cls: cls

    def stream(self, layer: object, point: str, hidden: Toy, run: object = 0) -> Toy:
        assert not hidden.split, f"{point} does not know that its tokens are split"
        return self._stream(point, hidden)

    def split_value(
        self, layer: object, point: str, hidden: Toy, run: object = 0
    ) -> Toy:
        assert hidden.split, f"{point} takes all tokens for a rank's share"
        return self._stream(point, hidden)

    def _stream(self, point: str, hidden: Toy) -> Toy:
        self.seen[point] = hidden.number
        self.paired[point] = False
        return hidden.made(hidden.number + self.change.get(point, 0.0))

    value = stream

    def pair(
        self,
        layer: object,
        point: str,
        hidden: Toy,
        residual: Toy | None,
        run: object = 0,
    ) -> tuple[Toy, Toy | None]:
        assert not hidden.split, f"{point} does not know that its tokens are split"
        return self._pair(point, hidden, residual)

    partial = pair

    def split_pair(
        self,
        layer: object,
        point: str,
        hidden: Toy,
        residual: Toy | None,
        run: object = 0,
    ) -> tuple[Toy, Toy | None]:
        assert hidden.split, f"{point} takes all tokens for a rank's share"
        return self._pair(point, hidden, residual)

    def _pair(
        self, point: str, hidden: Toy, residual: Toy | None
    ) -> tuple[Toy, Toy | None]:
        if residual is None:
            return self._stream(point, hidden), None
        assert hidden.split == residual.split, f"{point} is split by half"
        self.seen[point] = hidden.number + residual.number
        self.paired[point] = True
        change = self.change.get(point, 0.0)
        if self.replaces:
            whole = hidden.made(hidden.number + residual.number + change)
            return whole, hidden.made(0.0)
        return hidden.made(hidden.number + change), hidden.made(residual.number)

    def lone_token(
        self, layer: object, num_tokens: int, hidden: Toy, residual: Toy
    ) -> tuple[Toy, Toy]:
        assert hidden.split and residual.split
        return hidden, residual


class Layer:
    """Base of the toy layers, with the attributes that `forward` uses."""

    def __init__(
        self,
        builds: Mapping[str, str],
        adding: Callable[[str], bool],
        passing: tuple[str, ...] = (),
        truth: bool = False,
    ) -> None:
        self.builds_ = builds
        self.adding_ = adding
        self.passing_ = passing
        self.truth_ = truth
        self.mixed_: list[float] = []
        self.boost_ = 0.0
        """Added to the output of one token mixer."""
        self.boosted_ = 0
        """Which one, in the order of the pass."""
        self.mlp_scale_ = 1.0
        self.residual_taps = None

    def __getattr__(self, name: str) -> Any:
        role = role_of(name)
        if role is Role.OTHER or name == "mixer":
            role = role_of(self.builds_.get(name, ""))
        if name in self.passing_:
            return _Submodule(lambda *a, **k: self._pass(*a, **k))
        runs = {Role.NORM: self._norm(name), Role.MIXER: self._mix, Role.MLP: self._mlp}
        return _Submodule(runs[role]) if role in runs else Neutral(self.truth_)

    def _norm(self, name: str) -> Callable[..., Any]:
        def norm(hidden: Toy | None, residual: Toy | None = None) -> Any:
            if hidden is None:
                return Neutral()
            if residual is None:
                return hidden.made(hidden.number)
            assert hidden.split == residual.split
            if self.adding_(name):  # in place, like upstream's kernel
                residual.number += hidden.number
                hidden.number = residual.number
            return hidden, residual

        return norm

    def _mix(self, *args: Any, **kwargs: Any) -> Toy:
        assert not _inputs(args, kwargs)[0].split, "a mixer needs all tokens"
        output = math.sin(_inputs(args, kwargs)[0].number) + 0.25
        boost = self.boost_ if len(self.mixed_) == self.boosted_ else 0.0
        self.mixed_.append(output + boost)
        for buffer in _inputs(args, kwargs, buffers=True):
            buffer.number, buffer.is_buffer = self.mixed_[-1], False
        return Toy(self.mixed_[-1])

    def _mlp(self, *args: Any, **kwargs: Any) -> Toy:
        given = _inputs(args, kwargs)[0]
        return given.made(self.mlp_scale_ * (math.cos(given.number) + 0.125))

    def _pass(self, *args: Any, **kwargs: Any) -> Toy:
        return _inputs(args, kwargs)[0] + self._mix(*args, **kwargs)


class _Submodule(Neutral):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(truth=True)
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getitem__(self, index: object) -> _Submodule:
        return self

    def __getattr__(self, name: str) -> Any:
        return self if name.startswith("forward") else Neutral()


def _inputs(args: Any, kwargs: Any, buffers: bool = False) -> list[Toy]:
    given = [kwargs.get("hidden_states"), *args, *kwargs.values()]
    return [t for t in given if isinstance(t, Toy) and t.is_buffer == buffers]


def fused_allreduce(hidden: Toy, residual: Toy, norm: Any) -> Any:
    """Fused functions that reduce, add and norm, on one rank."""
    total = hidden.number + residual.number
    return Toy(total), Toy(total)


class Positions(Neutral):
    """As many positions as the step has tokens."""

    shape = (TOKENS, TOKENS)


def _gather(given: Toy, *_: object, **__: object) -> Toy:
    return given.over_ranks(split=False)


def _split(given: Toy, *_: object, **__: object) -> Toy:
    return given.over_ranks(split=True)


SPLITTING: dict[str, Callable[..., Toy]] = {
    "tensor_model_parallel_all_gather": _gather,
    "sp_all_gather": _gather,
    "tensor_model_parallel_reduce_scatter": _split,
    "sp_reduce_scatter": _split,
    "sequence_parallel_chunk": _split,
}
"""On one rank these collectives are the identity."""


class _NoAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Pass:
        return ast.Pass()


@lru_cache
def _code(source: str, name: str, kept: tuple[str, ...]) -> CodeType:
    """The functions `kept` of class `name`, compiled without their assertions."""
    tree = ast.parse(source)
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    wanted = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in kept]
    body = [*ast.parse("from __future__ import annotations").body, *wanted]
    module = ast.fix_missing_locations(_NoAsserts().visit(ast.Module(body, [])))
    return compile(module, name, "exec")


def methods(
    source: str, name: str, taps: Taps, inline: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`forward` and `inline` of class `name`, with toys for all names that they use."""
    names = Globals(
        torch=Torch(),
        residual_tap=taps,
        isinstance=lambda value, kind: False,
        fused_allreduce_rms_norm=fused_allreduce,
        fused_allreduce_gemma_rms_norm=fused_allreduce,
        **SPLITTING,
    )
    kept = ("forward", *inline)
    exec(_code(source, name, kept), names)
    return {method: names[method] for method in kept}


def run(
    layer: Layer,
    hidden: float,
    residual: float | None,
    taps: Taps,
    split: bool = False,
) -> float:
    """Call `forward`; returns the stream after it, as at its last hook point."""
    arguments: dict[str, Any] = {}
    function = type(layer).forward
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in HIDDEN_NAMES:
            arguments[name] = Toy(hidden, split=split)
        elif name == "residual":
            arguments[name] = None if residual is None else Toy(residual, split=split)
        elif name == "positions":
            arguments[name] = Positions()
        elif role_of(name) is Role.MLP:
            arguments[name] = getattr(layer, name)
        elif name != "self" and parameter.default is parameter.empty:
            arguments[name] = Neutral()
    result = function(layer, **arguments)
    parts = result if isinstance(result, tuple) else (result,)
    toys = [part for part in parts if isinstance(part, Toy)]
    return sum(t.number for t in (toys if taps.paired["post_block"] else toys[:1]))
