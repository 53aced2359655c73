# SPDX-License-Identifier: Apache-2.0
"""Evaluates a layer's expressions on symbolic sums of terms."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

import libcst as cst

from .events import NONE, Event, Holding, Trace, Value
from .layer_class import LayerClass, code
from .rules import Rule
from .stream import Role, Tensor, Term, Unprovable, role_of, split_of

_FUSED_REDUCE = re.compile(r"all_?reduce", re.IGNORECASE)
_BY_TOKENS = re.compile(r"all_gather|reduce_scatter|sequence_parallel|\bsp_")
_GATHERS = re.compile(r"all_gather$")
_SCATTERS = re.compile(r"reduce_scatter$")
_SHARES = re.compile(r"(sequence_parallel_chunk|\bsp_shard)$")
_SAME_SUM = frozenset({"clone", "contiguous", "to"})
_NOT_A_TENSOR = frozenset({"shape", "dtype", "device", "dim", "size", "numel"})
NAME = re.compile(r"(?<![\w.])[a-z_]\w*")


class Raised(Exception):
    """The path ends in an exception raised by the layer itself."""


class Expressions(ABC):
    """Evaluates expressions in an environment of names; a subclass runs statements."""

    def __init__(self, layer: LayerClass, rule: Rule) -> None:
        self.layer = layer
        self.rule = rule
        self.env: dict[str, Value] = {}
        self.trace = Trace(())
        self.statement: cst.CSTNode = layer.node

    @abstractmethod
    def decide(self, test: cst.BaseExpression) -> bool:
        """The outcome of a condition on this path."""

    @abstractmethod
    def run_method(self, method: cst.FunctionDef, call: cst.Call) -> list[Value]:
        """The values that a method of the class returns for `call`."""

    def value(self, node: cst.BaseExpression) -> Value:
        """The value of an expression."""
        if isinstance(node, cst.Name):
            return NONE if node.value == "None" else self.env.get(node.value)
        if isinstance(node, cst.BinaryOperation):
            left, right = self.value(node.left), self.value(node.right)
            self.sum(node, node.operator, (node.left, left), (node.right, right))
            return self.combine(node.operator, left, right, code(node))
        if isinstance(node, cst.IfExp):
            return self.value(node.body if self.decide(node.test) else node.orelse)
        if isinstance(node, cst.Call):
            return self.several(node, [""])[0]
        if isinstance(node, cst.Attribute) and node.attr.value in _NOT_A_TENSOR:
            return None
        held = self.read_by(node)
        if not held or isinstance(node, cst.Comparison | cst.BooleanOperation):
            return None
        return made(code(node), Role.OTHER, held)

    def sum(
        self,
        node: cst.CSTNode,
        operator: cst.CSTNode,
        *operands: tuple[cst.BaseExpression, Value],
    ) -> None:
        """Note that an expression or statement adds two tensors."""
        tensors = tuple(v.copy() for _, v in operands if isinstance(v, Tensor))
        if isinstance(operator, cst.Add | cst.AddAssign) and len(tensors) == 2:
            names = tuple(code(operand) for operand, _ in operands)
            self.event("sum", names, tensors, node=node)

    def combine(
        self, operator: cst.CSTNode, left: Value, right: Value, text: str
    ) -> Value:
        """The result of a binary operator: a sum, a scaled sum or something new."""
        tensors = [v for v in (left, right) if isinstance(v, Tensor)]
        if not tensors:
            return None
        if isinstance(operator, cst.Add | cst.AddAssign) and len(tensors) == 2:
            return tensors[0].plus(tensors[1])
        scaling = cst.Multiply | cst.MultiplyAssign | cst.Divide | cst.DivideAssign
        if isinstance(operator, scaling) and len(tensors) == 1:
            return tensors[0].scaled()
        return made(text, Role.OTHER, tensors)

    def several(self, node: cst.BaseExpression, names: list[str]) -> list[Value]:
        """The values into which `node` is unpacked."""
        if isinstance(node, cst.Tuple) and len(node.elements) == len(names):
            return [self.value(element.value) for element in node.elements]
        if isinstance(node, cst.IfExp):
            return self.several(
                node.body if self.decide(node.test) else node.orelse, names
            )
        if not isinstance(node, cst.Call):
            value = self.value(node)
            return [value.copy() if isinstance(value, Tensor) else value for _ in names]
        if self.is_tap(node):
            return self.tap(node)
        method = self.inlined(node)
        if method is not None:
            return self.run_method(method, node)
        if isinstance(node.func, cst.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, Tensor):
                return [self.method_of(owner, node)] * len(names)
        return self.called(node, len(names))

    def called(self, node: cst.Call, count: int) -> list[Value]:
        """The `count` results of a call that is not inlined."""
        callee, role = code(node.func), self.role(node)
        given = [(code(a.value), self.value(a.value)) for a in node.args]
        followed = [(text, t) for text, t in given if isinstance(t, Tensor) and t.terms]
        arguments = [tensor for _, tensor in followed]
        if role is Role.NORM and count == 2:
            if len(followed) == 2:
                return self.add_norm(callee, *followed)
            if any(value is NONE for _, value in given):
                raise Raised  # the norm returns one tensor, which cannot be unpacked
        if role is Role.BUFFER:
            return [Tensor.of(Term(callee, role))]
        if not arguments:
            return [None] * count
        if _FUSED_REDUCE.search(callee) and len(arguments) == 1 and count == 1:
            return [arguments[0].reduced()]
        if _BY_TOKENS.search(callee):
            return [self.over_ranks(node, arguments[0])]
        if role is Role.MIXER and split_of(arguments):
            raise Unprovable(f"{callee} is given a rank's share of the tokens")
        if role is Role.MLP:
            texts = tuple(text for text, _ in followed)
            copies = tuple(tensor.copy() for tensor in arguments)
            self.event("mlp", texts, copies, callee, node=node)
        results = [made(callee, role, arguments) for _ in range(count)]
        if _attribute(callee) in self.rule.passing:
            results[0] = arguments[0].plus(results[0])
        return list(results)

    def read_by(self, node: cst.BaseExpression) -> list[Tensor]:
        """The tracked tensors from which an expression is computed."""
        inner = node.value if isinstance(node, cst.Subscript) else None
        if isinstance(inner, cst.Call) and _BY_TOKENS.search(code(inner.func)):
            gathered = self.value(inner)  # the subscript removes its padding
            return [gathered] if isinstance(gathered, Tensor) else []
        return self.followed_in(node)

    def over_ranks(self, node: cst.Call, given: Tensor) -> Tensor:
        """The result of a function that splits a tensor over ranks or gathers it."""
        callee = code(node.func)
        if any(code(arg.value) != "0" for arg in node.args[1:]):
            raise Unprovable(f"{code(node)} splits something else than tokens")
        if _GATHERS.search(callee):
            return given.over_ranks(split=False)
        if _SCATTERS.search(callee):
            return given.reduced().over_ranks(split=True)
        if _SHARES.search(callee):
            return given.over_ranks(split=True)
        raise Unprovable(f"cannot tell how {callee} splits the tokens over ranks")

    def add_norm(
        self, callee: str, first: tuple[str, Tensor], second: tuple[str, Tensor]
    ) -> list[Value]:
        """The two results of a norm that is called with a branch and a residual."""
        (_, hidden), (_, residual) = first, second
        reduces = bool(_FUSED_REDUCE.search(callee))
        if not (reduces or self.adds(_attribute(callee))):
            if hidden.terms.keys() != residual.terms.keys():
                raise Unprovable(f"cannot tell whether {callee} adds the residual")
            return [made(callee, Role.NORM, [hidden]), residual]
        names = (first[0], second[0])
        self.event("fused", names, (hidden.copy(), residual.copy()), callee)
        total = (hidden.reduced() if reduces else hidden).plus(residual)
        return [made(callee, Role.NORM, [total]), total]

    def adds(self, attribute: str) -> bool:
        """Whether a norm adds its second argument to its first."""
        return attribute in self.rule.adding or self.layer.norm_adds(attribute)

    def tap(self, node: cst.Call) -> list[Value]:
        """The results of a hook point: new terms, which are tracked from there on."""
        callee = node.func
        while isinstance(callee, cst.IfExp):
            callee = callee.body if self.decide(callee.test) else callee.orelse
        method = code(callee).rpartition(".")[2]
        if method == "lone_token":  # the same sum, on more ranks
            return [self.value(arg.value) for arg in node.args[2:]]
        point = code(node.args[1].value).strip("\"'")
        given = [arg.value for arg in node.args[2:] if arg.keyword is None]
        values = [self.value(part) for part in given]
        tensors = tuple(v.copy() if isinstance(v, Tensor) else None for v in values)
        names = tuple(map(code, given))
        split = split_of(t for t in tensors if t is not None)
        if split != method.startswith("split_"):
            held = "a rank's share of the tokens" if split else "all tokens"
            raise Unprovable(f"{point} holds {held}, but its call is {method}")
        if method in ("value", "split_value"):
            self.event("value", names, tensors, point)
            reads = read(t for t in tensors if t is not None)
            return [Tensor.of(Term(names[0], Role.OTHER, reads, point), split)]
        self.event("tap", names, tensors, f"{method} {point}")
        return [
            Tensor.of(Term(names[part], Role.TAP, value.read(), point, part), split)
            if isinstance(value, Tensor)
            else value
            for part, value in enumerate(values)
        ]

    def method_of(self, owner: Tensor, node: cst.Call) -> Value:
        """The result of calling a method of a tensor."""
        assert isinstance(node.func, cst.Attribute)
        name = node.func.attr.value
        if name in _SAME_SUM:
            return owner.copy()
        if name in _NOT_A_TENSOR:
            return None
        return made(code(node.func), Role.OTHER, self.followed_in(node))

    def inlined(self, node: cst.BaseExpression) -> cst.FunctionDef | None:
        """The method of the class to inline for a call, or None."""
        if isinstance(node, cst.Call):
            name = code(node.func).removeprefix("self.")
            if name in self.rule.inline:
                return self.layer.methods[name]
        return None

    def is_tap(self, node: cst.BaseExpression) -> bool:
        """Whether the node is a call inserted by the weave."""
        return isinstance(node, cst.Call) and code(node.func).lstrip("(").startswith(
            "residual_tap."
        )

    def role(self, node: cst.Call) -> Role:
        """The role of a call, by its name or else by the class of its submodule."""
        attribute = _attribute(code(node.func))
        if attribute in self.rule.beside:
            return Role.BESIDE
        role = role_of(attribute)
        made_by = self.rule.made.get(attribute) or self.layer.builds.get(attribute)
        if made_by is not None and (role is Role.OTHER or attribute == "mixer"):
            return role_of(made_by)
        return role

    def reads(self, node: cst.CSTNode) -> frozenset[Term]:
        """The terms of every tracked tensor whose name occurs in `node`."""
        return read(self.followed_in(node))

    def followed_in(self, node: cst.CSTNode) -> list[Tensor]:
        """The tracked tensors with terms whose names occur in `node`."""
        names = set(NAME.findall(code(node)))
        held = [self.env[name] for name in names & self.env.keys()]
        return [t for t in held if isinstance(t, Tensor) and t.terms]

    def event(
        self,
        kind: str,
        names: tuple[str, ...],
        tensors: tuple[Tensor | None, ...],
        label: str = "",
        holding: Holding = (),
        node: cst.CSTNode | None = None,
    ) -> None:
        """Append an event to the trace."""
        self.trace.events.append(
            Event(kind, self.statement, names, tensors, label, holding, node)
        )

    def holding(self) -> Holding:
        """Every name with a copy of its current tensor."""
        return tuple(
            (name, value.copy())
            for name, value in self.env.items()
            if isinstance(value, Tensor)
        )


def read(tensors: Iterable[Tensor]) -> frozenset[Term]:
    """The terms that a call with these `tensors` reads."""
    return frozenset().union(*(tensor.read() for tensor in tensors))


def made(label: str, role: Role, given: Iterable[Tensor]) -> Tensor:
    """The result of a token-wise call with the tensors `given`."""
    given = list(given)
    return Tensor.of(Term(label, role, read(given)), split_of(given))


def _attribute(callee: str) -> str:
    """The name of a callee: `mixer` for `self.mixer.forward`, else the function's."""
    found = re.match(r"self\.(\w+)", callee)
    return found.group(1) if found else callee
