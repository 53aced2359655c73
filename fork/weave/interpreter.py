# SPDX-License-Identifier: Apache-2.0
"""Interprets a decoder layer's `forward` on symbolic sums, one path at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from .events import NONE, Holding, NoTensor, Trace, Value
from .expressions import NAME, Expressions, Raised, made
from .layer_class import LayerClass, code
from .rules import Rule
from .stream import HIDDEN_NAMES, Role, Tensor, Term, Unprovable

RESIDUAL = "residual"
MAX_PATHS = 4096
_ASSUMED = {"self.tp_size > 1": True}
"""With one rank a reduction is the identity, so the case of several covers it."""


class _Returned(Exception):
    """The path reached a return statement."""

    def __init__(self, values: list[Value]) -> None:
        self.values = values


def paths(layer: LayerClass, rule: Rule, assume: Mapping[str, bool]) -> Iterator[Trace]:
    """Yield the trace of each consistent path through a layer's `forward` once.

    Equal conditions on values that do not change have equal outcomes on a path.

    Args:
        layer: the class.
        rule: its rule.
        assume: outcomes of conditions, by source text.

    Raises:
        Unprovable: a construct cannot be interpreted.
    """
    pending: list[list[bool]] = [[]]
    count = 0
    while pending:
        count += 1
        if count > MAX_PATHS:
            raise Unprovable(f"more than {MAX_PATHS} paths")
        path = _Path(layer, rule, assume, pending.pop())
        trace = path.run()
        pending.extend(path.alternatives)
        if trace is not None:
            yield trace


class _Path(Expressions):
    """One path. Decisions after `given` are True; their opposites are alternatives."""

    def __init__(
        self,
        layer: LayerClass,
        rule: Rule,
        assume: Mapping[str, bool],
        given: list[bool],
    ) -> None:
        super().__init__(layer, rule)
        self.method = layer.methods["forward"]
        self.assume = {**_ASSUMED, **assume}
        self.given = given
        self.taken: list[bool] = []
        self.alternatives: list[list[bool]] = []
        self.known: dict[str, bool] = {}
        self.small: cst.CSTNode = self.method
        self.depth = 0
        self.params = [
            p.name.value
            for p in (*self.method.params.params, *self.method.params.kwonly_params)
        ]

    def run(self) -> Trace | None:
        entry = []
        hidden = next((n for n in HIDDEN_NAMES if n in self.params), None)
        if hidden is None:
            raise Unprovable(f"forward takes none of {', '.join(HIDDEN_NAMES)}")
        split = self.assume.get(self.rule.enters_split, False)
        tensor = Tensor.of(Term(hidden, Role.ENTRY), split)
        entry.append(tensor.copy())
        self.env[hidden] = tensor
        if RESIDUAL in self.params:
            if self.choose():
                self.env[RESIDUAL] = NONE
            else:
                tensor = Tensor.of(Term(RESIDUAL, Role.ENTRY), split)
                entry.append(tensor.copy())
                self.env[RESIDUAL] = tensor
        self.trace = Trace(tuple(entry))
        try:
            self.block(self.method.body)
        except _Returned:
            return self.trace
        except Raised:
            return None
        raise Unprovable("forward can end without a return")

    # Decisions

    def choose(self) -> bool:
        if len(self.taken) < len(self.given):
            outcome = self.given[len(self.taken)]
        else:
            outcome = True
            self.alternatives.append([*self.taken, False])
        self.taken.append(outcome)
        return outcome

    def decide(self, test: cst.BaseExpression) -> bool:
        text = code(test.with_changes(lpar=(), rpar=()))
        if text in self.assume:
            return self.assume[text]
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            return not self.decide(test.expression)
        if isinstance(test, cst.BooleanOperation):
            left = self.decide(test.left)
            if isinstance(test.operator, cst.And):
                return left and self.decide(test.right)
            return left or self.decide(test.right)
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            operator = test.comparisons[0].operator
            if isinstance(operator, cst.Is | cst.IsNot):
                value = self.value(test.left)
                if value is not None and code(test.comparisons[0].comparator) == "None":
                    return isinstance(value, NoTensor) == isinstance(operator, cst.Is)
                if isinstance(operator, cst.IsNot):
                    return not self.remembered(text.replace(" is not ", " is "))
        return self.remembered(text)

    def remembered(self, text: str) -> bool:
        """A condition's outcome, which is constant on a path unless it reads locals."""
        if set(NAME.findall(text)) & self.env.keys():
            return self.choose()
        if text not in self.known:
            self.known[text] = self.choose()
        return self.known[text]

    # Statements

    def block(self, body: cst.BaseSuite) -> None:
        for node in body.body:
            if isinstance(node, cst.SimpleStatementLine):
                for small in node.body:
                    self.statement = node
                    self.simple(small)
            elif isinstance(node, cst.If):
                self.branch(node)
            elif isinstance(node, cst.With):
                self.block(node.body)
            elif self.reads(node):
                raise Unprovable(f"a {type(node).__name__} statement over the stream")

    def branch(self, node: cst.If) -> None:
        self.statement = node
        if self.decide(node.test):
            self.block(node.body)
        elif isinstance(node.orelse, cst.If):
            self.branch(node.orelse)
        elif node.orelse is not None:
            self.block(node.orelse.body)

    def simple(self, node: cst.CSTNode) -> None:
        self.small = node
        if isinstance(node, cst.Assign):
            for target in node.targets:
                self.assign(target.target, node.value)
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, cst.AugAssign):
            self.change(node)
        elif isinstance(node, cst.Expr):
            self.call_for_effect(node.value)
        elif isinstance(node, cst.Return):
            self.leave(node)
        elif isinstance(node, cst.Raise):
            raise Raised

    def assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if isinstance(target, cst.Tuple):
            names = [code(element.value) for element in target.elements]
            results = self.several(value, names)
            if len(results) != len(names):
                raise Unprovable(f"{code(value)} is unpacked into {len(names)} names")
            for name, result in zip(names, results, strict=True):
                self.bind(name, result)
        elif isinstance(target, cst.Name):
            self.bind(target.value, self.value(value))
        elif self.reads(value):
            base = target.value if isinstance(target, cst.Subscript) else None
            held = self.value(base) if base is not None else None
            if isinstance(held, Tensor) and held.terms:
                raise Unprovable(f"{code(target)} is written in part")

    def bind(self, name: str, result: Value, before: Holding | None = None) -> None:
        if name == "_":
            return
        before = self.holding() if before is None else before
        self.env[name] = result
        if not isinstance(result, Tensor) or not result.terms:
            return
        if len(result.terms) > 1:
            self.event("add", (name,), (result.copy(),), holding=before)
        elif next(iter(result.terms)).role not in (Role.ENTRY, Role.TAP):
            self.event("made", (name,), (result.copy(),), holding=self.holding())

    def change(self, node: cst.AugAssign) -> None:
        held, operand = self.value(node.target), self.value(node.value)
        if not isinstance(held, Tensor):
            if isinstance(operand, Tensor) and isinstance(node.target, cst.Subscript):
                raise Unprovable(f"{code(node.target)} is written in part")
            return
        before = self.holding()
        self.sum(node, node.operator, (node.target, held), (node.value, operand))
        result = self.combine(node.operator, held, operand, code(node))
        held.terms = result.terms if isinstance(result, Tensor) else {}
        held.split = isinstance(result, Tensor) and result.split
        self.bind(code(node.target), held, before)

    def call_for_effect(self, node: cst.BaseExpression) -> None:
        if not isinstance(node, cst.Call):
            return
        values = [self.value(arg.value) for arg in node.args]
        tensors = [t for t in values if isinstance(t, Tensor) and t.terms]
        buffers = [t for t in tensors if t.is_buffer]
        given = [t for t in tensors if t not in buffers]
        for buffer in buffers:
            written = made(code(node.func), self.role(node), given)
            buffer.terms, buffer.split = written.terms, written.split
            for name, value in self.env.items():
                if value is buffer:
                    self.bind(name, buffer)
                    break

    def leave(self, node: cst.Return) -> None:
        if node.value is None:
            raise Unprovable("forward returns nothing")
        method = self.inlined(node.value)
        if method is not None:
            assert isinstance(node.value, cst.Call)
            raise _Returned(self.run_method(method, node.value))
        if isinstance(node.value, cst.Tuple):
            parts = [element.value for element in node.value.elements]
            values = [self.value(part) for part in parts]
        else:
            parts = [node.value]
            both = ["", ""] if self.is_tap(node.value) else [""]
            values = self.several(node.value, both)
        if self.depth == 0:
            tensors = tuple(v if isinstance(v, Tensor) else None for v in values)
            names = tuple(code(part) for part in parts)
            self.event("return", names, tensors, node=node)
        raise _Returned(values)

    def run_method(self, method: cst.FunctionDef, node: cst.Call) -> list[Value]:
        names = [p.name.value for p in method.params.params][1:]
        outer, given = self.env, {}
        for name, argument in zip(names, node.args, strict=False):
            key = argument.keyword.value if argument.keyword else name
            given[key] = self.value(argument.value)
        tail = isinstance(self.small, cst.Return)
        self.env, self.depth = given, self.depth + (not tail)
        try:
            self.block(method.body)
        except _Returned as returned:
            return returned.values
        finally:
            self.env, self.depth = outer, self.depth - (not tail)
        raise Unprovable(f"{method.name.value} can end without a return")
