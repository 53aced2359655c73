# SPDX-License-Identifier: Apache-2.0
"""Add a keyword argument to calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fork.language.edit import Change, Edit, Resolution, caller_line
from fork.language.lookup import absence
from fork.language.pattern import matches
from fork.language.problems import AlreadyApplied
from fork.language.separated import insert_item
from fork.language.tree import Tree, expressions


@dataclass(frozen=True, kw_only=True)
class AddArgument(Edit):
    """A new keyword argument of the calls of one callee."""

    call: str
    argument: str
    _callee: cst.BaseExpression = field(init=False, repr=False, compare=False)
    _argument: cst.Arg = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            callee = cst.parse_expression(self.call)
            probe = cst.parse_expression(f"f({self.argument})")
        except cst.ParserSyntaxError as error:
            raise ValueError(
                f"call={self.call!r}, argument={self.argument!r}: {error.message}"
            ) from None
        assert isinstance(probe, cst.Call), "f(...) parses as a call"
        if len(probe.args) != 1 or probe.args[0].keyword is None:
            raise ValueError(f"argument={self.argument!r}: give one, as name=value")
        object.__setattr__(self, "_callee", callee)
        object.__setattr__(self, "_argument", probe.args[0])

    @property
    def subject(self) -> str:
        """The callee."""
        return f"{self.call}({self.argument})"

    def resolve(self, tree: Tree) -> Resolution:
        """Add the argument to every call of the callee in the scope."""
        finding = absence(self, tree, self._search)
        if finding is not None:
            return finding
        calls = [c for scope in tree.scopes(self.scope) for c in self._search(scope)]
        if any(self._is_applied(call) for call in calls):
            return AlreadyApplied(self.scope)
        return tuple(Change(node=call, rewrite=self._rewrite) for call in calls)

    def _search(self, owner: cst.CSTNode) -> Iterator[cst.Call]:
        for node in expressions(owner):
            if isinstance(node, cst.Call) and matches(self._callee, node.func):
                yield node

    def _is_applied(self, call: cst.Call) -> bool:
        assert self._argument.keyword is not None, "checked when the edit was made"
        name = self._argument.keyword.value
        return any(a.keyword is not None and a.keyword.value == name for a in call.args)

    def _rewrite(self, node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call), "only calls are found"
        index = len(node.args)
        while index and node.args[index - 1].star == "**":
            index -= 1
        items = insert_item(
            list(node.args), index, self._argument, node.whitespace_before_args
        )
        return node.with_changes(args=tuple(items))


def add_argument(
    *, scope: str, call: str, argument: str, why: str, count: int = 1
) -> AddArgument:
    """Add `name=value` to the calls of `call`, last but before any `**kwargs`."""
    return AddArgument(
        scope=scope,
        call=call,
        argument=argument,
        why=why,
        count=count,
        line=caller_line(),
    )
