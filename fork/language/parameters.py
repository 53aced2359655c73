# SPDX-License-Identifier: Apache-2.0
"""Add a parameter to a function."""

from dataclasses import dataclass, field

import libcst as cst

from fork.language.edit import Change, Edit, Resolution, caller_line
from fork.language.lookup import find_scopes
from fork.language.problems import AlreadyApplied, MissingScope, Unfit
from fork.language.separated import insert_item
from fork.language.tree import Tree

_Named = tuple[str, cst.CSTNode]
"""A field of `Parameters`, and a parameter in it."""


@dataclass(frozen=True, kw_only=True)
class AddParameter(Edit):
    """A new parameter of a function."""

    parameter: str
    after: str | None
    _parameter: cst.Param = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_parameter", _parse(self.parameter))

    @property
    def subject(self) -> str:
        """The parameter."""
        return self.parameter

    def resolve(self, tree: Tree) -> Resolution:
        """Add the parameter to every function with this path."""
        scopes = find_scopes(self, tree)
        if isinstance(scopes, MissingScope):
            return scopes
        for scope in scopes:
            finding = self._obstacle(scope)
            if finding is not None:
                return finding
        wrong = self.miscounted(len(scopes))
        return wrong or tuple(Change(node=s, rewrite=self._rewrite) for s in scopes)

    def _obstacle(self, scope: cst.CSTNode) -> AlreadyApplied | Unfit | None:
        if not isinstance(scope, cst.FunctionDef):
            return Unfit(f'"{self.scope}" is not a function')
        names = [_name(node) for _, node in _flat(scope.params)]
        if self._parameter.name.value in names:
            return AlreadyApplied(self.scope)
        if self.after is not None and self.after not in names:
            return Unfit(f'"{self.scope}" has no parameter "{self.after}"')
        try:
            self._rewrite(scope)
        except cst.CSTValidationError as error:
            return Unfit(str(error).rstrip("."))
        return None

    def _rewrite(self, node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.FunctionDef), "checked when the edit was resolved"
        flat = _flat(node.params)
        index, kind = self._position(flat)
        items = insert_item(
            [item for _, item in flat],
            index,
            self._parameter,
            node.whitespace_before_params,
        )
        kinds = [kind_ for kind_, _ in flat]
        kinds.insert(index, kind)
        return node.with_changes(params=_assemble(node.params, kinds, items))

    def _position(self, flat: list[_Named]) -> tuple[int, str]:
        kinds = [kind for kind, _ in flat]
        if self.after is not None:
            index = [_name(node) for _, node in flat].index(self.after)
            kind = "kwonly_params" if kinds[index] == "star_arg" else kinds[index]
            return index + 1, kind
        index = len(flat) - kinds.count("star_kwarg")
        is_keyword_only = "star_arg" in kinds
        return index, "kwonly_params" if is_keyword_only else "params"


def _parse(text: str) -> cst.Param:
    try:
        function = cst.parse_statement(f"def f({text}): pass")
    except cst.ParserSyntaxError as error:
        raise ValueError(f"parameter={text!r}: {error.message}") from None
    assert isinstance(function, cst.FunctionDef), "a def parses as a function"
    if len(function.params.params) != 1:
        raise ValueError(f"parameter={text!r}: give one plain parameter")
    return function.params.params[0]


def _name(node: cst.CSTNode) -> str | None:
    return node.name.value if isinstance(node, cst.Param) else None


def _flat(parameters: cst.Parameters) -> list[_Named]:
    flat: list[_Named] = [("posonly_params", p) for p in parameters.posonly_params]
    if isinstance(parameters.posonly_ind, cst.ParamSlash):
        flat.append(("posonly_ind", parameters.posonly_ind))
    flat += [("params", p) for p in parameters.params]
    if isinstance(parameters.star_arg, cst.CSTNode):
        flat.append(("star_arg", parameters.star_arg))
    flat += [("kwonly_params", p) for p in parameters.kwonly_params]
    if parameters.star_kwarg is not None:
        flat.append(("star_kwarg", parameters.star_kwarg))
    return flat


def _assemble(
    parameters: cst.Parameters, kinds: list[str], items: list[cst.CSTNode]
) -> cst.Parameters:
    groups: dict[str, list[cst.CSTNode]] = {}
    for kind, item in zip(kinds, items, strict=True):
        groups.setdefault(kind, []).append(item)
    single = {"posonly_ind", "star_arg", "star_kwarg"}
    return parameters.with_changes(
        **{
            kind: group[0] if kind in single else tuple(group)
            for kind, group in groups.items()
        }
    )


def add_parameter(
    *, scope: str, parameter: str, why: str, after: str | None = None, count: int = 1
) -> AddParameter:
    """Add a parameter after the one named, otherwise last, before any `**kwargs`."""
    return AddParameter(
        scope=scope,
        parameter=parameter,
        after=after,
        why=why,
        count=count,
        line=caller_line(),
    )
