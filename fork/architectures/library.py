# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the installed Transformers library, which upstream's backend runs.

The server weaves them when a model is loaded. Here the same analysis runs on the
library's sources, to report the result in advance.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from fork.weave.decoder_layers import Layer, weave_classes
from fork.weave.rules import NEVER_GIVEN, Rule

_LAYER = re.compile(r"(Decoder\w*Layer|Block|Layer)$")
_BESIDE = re.compile(r"Vision|Audio|Encoder|QFormer|Swin|VQ|Connector")
_STACKS = ("ModuleList", "Sequential")


@dataclass(frozen=True)
class Library:
    """The sources of one installation."""

    root: Path
    """The package's folder."""
    version: str

    def layers(self, architecture: str) -> list[Layer]:
        """The decoder-layer classes of a model class; empty if it does not exist."""
        path = self.files.get(architecture)
        if path is None:
            return []
        source = path.read_text(encoding="utf-8")
        module = path.relative_to(self.root.parent).as_posix()
        found = _layer_classes(ast.parse(source), architecture)
        return [_layer(source, module, name) for name in found]

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each model class, by name."""
        classes: dict[str, Path] = {}
        for path in sorted(self.root.glob("models/*/modeling_*.py")):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE):
                classes.setdefault(name, path)
        return classes


def installed() -> Library | None:
    """The library of this environment; None if it has none."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    return Library(Path(spec.origin).parent, version("transformers"))


def _layer(source: str, module: str, name: str) -> Layer:
    rule = Rule(reason="woven when the model is loaded", cases=(NEVER_GIVEN,))
    result = weave_classes(source, {name: rule})
    if result.problems:
        return Layer(name=name, module=module, refused=result.problems[0])
    return replace(result.layers[0], module=module, rule="")


def _layer_classes(tree: ast.Module, architecture: str) -> list[str]:
    """Classes that fill a list of modules in the model class or its parts."""
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    found: list[str] = []
    pending, seen = [architecture], {architecture}
    while pending:
        node = classes[pending.pop(0)]
        found += [name for name in _stacked(node) if name not in found]
        words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        fresh = sorted((words & classes.keys()) - seen)
        seen |= set(fresh)
        pending += fresh
    return [n for n in found if n in classes and not _BESIDE.search(n)]


def _stacked(node: ast.ClassDef) -> Iterator[str]:
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    stacks = [call for call in calls if ast.unparse(call.func).endswith(_STACKS)]
    for part in (inner for stack in stacks for inner in ast.walk(stack)):
        if isinstance(part, ast.Call) and _LAYER.search(ast.unparse(part.func)):
            yield ast.unparse(part.func)
