# SPDX-License-Identifier: Apache-2.0
"""Finds the classes that a model class of upstream uses, across imports."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

Place = tuple[str, str]
"""The path of a module in the wheel, and a name at its top level."""

_FOLLOWED = ("vllm/model_executor/models/", "vllm/models/")
_LANGUAGE_MODEL = "init_vllm_registered_model"
_CHOICES = ("layer_type", "decoder_layer_type", "block_cls")
"""Parameters and attributes that select a model's layer class."""


@dataclass(frozen=True, slots=True)
class Part:
    """The names that one method, or the rest of a definition, mentions."""

    words: frozenset[str] = frozenset()
    choices: frozenset[str] = frozenset()
    """Names assigned to a parameter or attribute that selects the layer class."""
    architectures: frozenset[str] | None = None
    """Architectures of the language model that is built here.

    Empty if its configuration names them; None if none is built here.
    """
    continues: bool = True
    """Whether it calls the method that it overrides."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A class, function or variable."""

    outside: Part
    methods: dict[str, Part] = field(default_factory=dict)
    bases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceModule:
    """The definitions and imports of one file."""

    definitions: dict[str, Definition]
    imports: dict[str, list[Place]]
    """Includes imports in functions and in platform-dependent branches."""


@dataclass
class Reached:
    """The definitions that one model class uses, nearest first."""

    used: list[Place] = field(default_factory=list)
    """Definitions that are mentioned, other than as a base class."""
    choices: list[frozenset[Place]] = field(default_factory=list)
    """The layer classes that each definition selects; nearer ones take precedence."""
    architectures: set[str] = field(default_factory=set)
    wraps: bool = False


class Sources:
    """The model sources below the root of an unpacked release."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = lru_cache(maxsize=None)(self._module)

    def reach(self, place: Place) -> Reached:
        """Everything that the definition at `place` uses, directly or indirectly."""
        reached = Reached()
        seen: set[tuple[Place, bool]] = set()
        queue: deque[tuple[Place, bool, frozenset[str]]] = deque()
        queue.append((place, True, frozenset()))
        while queue:
            here, mentioned, overridden = queue.popleft()
            if (here, mentioned) in seen:
                continue
            seen.add((here, mentioned))
            path, name = here
            module = self.module(path)
            if module is None:
                continue
            definition = module.definitions.get(name)
            if definition is None:
                imported = module.imports.get(name, [])
                queue.extendleft((p, mentioned, overridden) for p in imported)
                continue
            if mentioned:
                reached.used.append(here)
            for part in _parts(definition, overridden):
                queue.extend(((path, w), True, frozenset()) for w in sorted(part.words))
                self._note(reached, path, part)
            hidden = overridden | {
                name for name, part in definition.methods.items() if not part.continues
            }
            queue.extend(((path, base), False, hidden) for base in definition.bases)
        return reached

    def _note(self, reached: Reached, path: str, part: Part) -> None:
        if part.choices:
            reached.choices.append(
                frozenset(
                    p for word in part.choices for p in self.resolve((path, word))
                )
            )
        if part.architectures is not None:
            reached.wraps = True
            reached.architectures |= part.architectures

    def resolve(self, place: Place) -> list[Place]:
        """Where a name is defined, after following imports."""
        module = self.module(place[0])
        if module is None or place[1] in module.definitions:
            return [place]
        return [p for q in module.imports.get(place[1], []) for p in self.resolve(q)]

    def _module(self, path: str) -> SourceModule | None:
        file = self.root / path
        if not path.startswith(_FOLLOWED) or not file.exists():
            return None
        tree = ast.parse(file.read_text(encoding="utf-8"))
        return SourceModule(dict(_definitions(tree)), self._imports(tree, path))

    def _imports(self, tree: ast.Module, path: str) -> dict[str, list[Place]]:
        found: dict[str, list[Place]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = self._path(node, path)
                for alias in node.names:
                    name = alias.asname or alias.name
                    found.setdefault(name, []).append((source, alias.name))
        return found

    def _path(self, node: ast.ImportFrom, path: str) -> str:
        """The file that a `from ... import` reads."""
        module = Path(*(node.module or "").split("."))
        if node.level:
            module = Path(path).parents[node.level - 1] / module
        if (self.root / module).is_dir():
            module = module / "__init__"
        return f"{module.as_posix()}.py"


def _parts(definition: Definition, overridden: frozenset[str]) -> Iterator[Part]:
    yield definition.outside
    for name, part in definition.methods.items():
        if name not in overridden:
            yield part


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _class(node)
        elif isinstance(node, ast.FunctionDef):
            yield node.name, Definition(_part([node], ""))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, Definition(_part([node.value], ""))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, Definition(_part([node], ""))


def _class(node: ast.ClassDef) -> Definition:
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    rest = [part for part in node.body if not isinstance(part, ast.FunctionDef)]
    return Definition(
        outside=_part([*rest, *node.decorator_list], node.name),
        methods={method.name: _part([method], node.name) for method in methods},
        bases=tuple(base.id for base in node.bases if isinstance(base, ast.Name)),
    )


def _part(nodes: list[ast.AST], owner: str) -> Part:
    words: list[str] = []
    choices: list[str] = []
    architectures: set[str] | None = None
    continues = False
    tested = {id(name) for node in nodes for name in _tested(node)}
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name) and id(node) not in tested:
            words.append(node.id)
        elif isinstance(node, ast.Call) and _called(node) == _LANGUAGE_MODEL:
            architectures = (architectures or set()) | _named(node)
        elif isinstance(node, ast.Call) and _called(node) == "super":
            continues |= not node.args or ast.unparse(node.args[0]) == owner
        choices += _chosen(node)
    for choice in choices:
        words.remove(choice)
    return Part(
        words=frozenset(words),
        choices=frozenset(choices),
        architectures=None if architectures is None else frozenset(architectures),
        continues=continues,
    )


def _tested(node: ast.AST) -> Iterator[ast.AST]:
    """Names that are only tested or accessed, without making an instance."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _called(part) in ("super", "isinstance"):
            for argument in part.args:
                yield from ast.walk(argument)
        elif isinstance(part, ast.Attribute) and ast.unparse(part.value)[0].isupper():
            yield part.value


def _chosen(node: ast.AST) -> list[str]:
    """Names that `node` itself assigns to a selector of the layer class."""
    values: list[ast.expr | None] = []
    if isinstance(node, ast.keyword) and node.arg in _CHOICES:
        values = [node.value]
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id in _CHOICES for t in targets):
            value = node.value
            values = [*value.values] if isinstance(value, ast.BoolOp) else [value]
    elif isinstance(node, ast.arguments):
        defaults = [*[None] * (len(node.args) - len(node.defaults)), *node.defaults]
        pairs = zip(
            [*node.args, *node.kwonlyargs], [*defaults, *node.kw_defaults], strict=True
        )
        values = [default for parameter, default in pairs if parameter.arg in _CHOICES]
    return [v.id for v in values if isinstance(v, ast.Name) and v.id not in _CHOICES]


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _named(call: ast.Call) -> set[str]:
    """The architectures that a call names."""
    return {
        part.value
        for keyword in call.keywords
        if keyword.arg == "architectures"
        for part in ast.walk(keyword.value)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
