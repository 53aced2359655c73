# SPDX-License-Identifier: Apache-2.0
"""Add a decorator to a class or a function."""

from dataclasses import dataclass, field

import libcst as cst

from fork.language.edit import Change, Edit, Resolution, caller_line
from fork.language.lookup import find_scopes
from fork.language.nodes import Definition
from fork.language.pattern import equal
from fork.language.problems import AlreadyApplied, MissingScope, Unfit
from fork.language.tree import Tree


@dataclass(frozen=True, kw_only=True)
class AddDecorator(Edit):
    """A new outermost decorator."""

    decorator: str
    _decorator: cst.Decorator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            expression = cst.parse_expression(self.decorator.removeprefix("@"))
        except cst.ParserSyntaxError as error:
            raise ValueError(f"decorator={self.decorator!r}: {error.message}") from None
        decorator = cst.Decorator(decorator=expression)
        object.__setattr__(self, "_decorator", decorator)

    @property
    def subject(self) -> str:
        """The decorator."""
        return self.decorator

    def resolve(self, tree: Tree) -> Resolution:
        """Decorate every definition with this path."""
        scopes = find_scopes(self, tree)
        if isinstance(scopes, MissingScope):
            return scopes
        for scope in scopes:
            if not isinstance(scope, Definition):
                return Unfit("a module takes no decorator")
            if any(equal(self._decorator, there) for there in scope.decorators):
                return AlreadyApplied(self.scope)
        wrong = self.miscounted(len(scopes))
        return wrong or tuple(Change(node=s, rewrite=self._rewrite) for s in scopes)

    def _rewrite(self, node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, Definition), "checked when the edit was resolved"
        return node.with_changes(decorators=(self._decorator, *node.decorators))


def add_decorator(
    *, scope: str, decorator: str, why: str, count: int = 1
) -> AddDecorator:
    """Put a decorator above all others of a class or function."""
    return AddDecorator(
        scope=scope, decorator=decorator, why=why, count=count, line=caller_line()
    )
