# SPDX-License-Identifier: Apache-2.0
"""Add a field to a class."""

from dataclasses import dataclass, field

import libcst as cst

from fork.language.code import parse_statements
from fork.language.edit import Change, Edit, Resolution, Statements, caller_line
from fork.language.lookup import find_scopes
from fork.language.nodes import is_docstring, statements_of
from fork.language.problems import AlreadyApplied, MissingScope, Unfit
from fork.language.tree import Tree


@dataclass(frozen=True, kw_only=True)
class AddField(Edit):
    """A new field of a class, with its docstring."""

    after: str
    insert: str
    _insert: Statements = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        insert = parse_statements(self.insert)
        if not any(_field_name(node) for node in insert):
            raise ValueError(f"insert={self.insert!r}: declares no field")
        object.__setattr__(self, "_insert", insert)

    @property
    def subject(self) -> str:
        """The field it follows."""
        return self.after

    def resolve(self, tree: Tree) -> Resolution:
        """Insert below the named field and below its docstring."""
        scopes = find_scopes(self, tree)
        if isinstance(scopes, MissingScope):
            return scopes
        new = {_field_name(node) for node in self._insert} - {None}
        changes = []
        for scope in scopes:
            body = list(statements_of(scope))
            names = [_field_name(node) for node in body]
            if new & set(names):
                return AlreadyApplied(self.scope)
            if self.after not in names:
                return Unfit(f'"{self.scope}" has no field "{self.after}"')
            changes.append(
                Change(node=_end(body, names.index(self.after)), after=self._insert)
            )
        return self.miscounted(len(changes)) or tuple(changes)


def _end(body: list[cst.CSTNode], index: int) -> cst.CSTNode:
    if index + 1 < len(body) and is_docstring(body[index + 1]):
        return body[index + 1]
    return body[index]


def _field_name(node: cst.CSTNode) -> str | None:
    if not isinstance(node, cst.SimpleStatementLine):
        return None
    small = node.body[0]
    if isinstance(small, cst.AnnAssign):
        target: cst.CSTNode = small.target
    elif isinstance(small, cst.Assign):
        target = small.targets[0].target
    else:
        return None
    return target.value if isinstance(target, cst.Name) else None


def add_field(
    *, scope: str, after: str, insert: str, why: str, count: int = 1
) -> AddField:
    """Add a field to a class below the field `after`."""
    return AddField(
        scope=scope,
        after=after,
        insert=insert,
        why=why,
        count=count,
        line=caller_line(),
    )
