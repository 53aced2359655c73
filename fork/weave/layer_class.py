# SPDX-License-Identifier: Apache-2.0
"""Parsed modules and classes with the lookups that the weave needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
import libcst.matchers as m

ADDING_NORMS = frozenset({"RMSNorm", "GemmaRMSNorm"})
"""Norms in upstream's `layernorm` module that add their two arguments.

Called with two arguments they return `(norm(x + residual), x + residual)`.
"""
_NORM_MODULE = "vllm.model_executor.layers.layernorm"
_ADDS_RESIDUAL = re.compile(r"\+ residual\b|residual \+|fused_add|, residual\)")

_EMPTY = cst.Module([])


def code(node: cst.CSTNode) -> str:
    """The source text of one node."""
    return _EMPTY.code_for_node(node).strip()


@dataclass(frozen=True)
class Module:
    """One parsed source file."""

    tree: cst.Module

    @cached_property
    def classes(self) -> dict[str, LayerClass]:
        """Classes at the top level of the file."""
        return {
            node.name.value: LayerClass(node, self)
            for node in self.tree.body
            if isinstance(node, cst.ClassDef)
        }

    @cached_property
    def adding_norms(self) -> frozenset[str]:
        """Names in this file of norms that add their second argument."""
        names = set()
        lines = (n for n in self.tree.body if isinstance(n, cst.SimpleStatementLine))
        for node in (small for line in lines for small in line.body):
            if not isinstance(node, cst.ImportFrom) or node.module is None:
                continue
            if isinstance(node.names, cst.ImportStar):
                continue
            if code(node.module) == _NORM_MODULE:
                for alias in node.names:
                    if alias.evaluated_name in ADDING_NORMS:
                        names.add(alias.evaluated_alias or alias.evaluated_name)
        for name, cls in self.classes.items():
            if names & set(cls.bases) or (
                "norm" in name.lower() and _ADDS_RESIDUAL.search(code(cls.node))
            ):
                names.add(name)
        return frozenset(names)


@dataclass(frozen=True)
class LayerClass:
    """A class, with its methods and the submodules that it builds."""

    node: cst.ClassDef
    module: Module

    @property
    def name(self) -> str:
        """The class's name."""
        return self.node.name.value

    @property
    def bases(self) -> tuple[str, ...]:
        """The base classes as written."""
        return tuple(code(arg.value) for arg in self.node.bases)

    @cached_property
    def methods(self) -> dict[str, cst.FunctionDef]:
        """The methods that the class itself defines, by name."""
        return {
            node.name.value: node
            for node in self.node.body.body
            if isinstance(node, cst.FunctionDef)
        }

    @cached_property
    def builds(self) -> dict[str, str]:
        """The callable that makes each attribute, from `self.x = Callable(...)`."""
        found: dict[str, str] = {}
        for base in self.bases:
            if base in self.module.classes and base != self.name:
                found |= self.module.classes[base].builds
        pattern = m.Assign(
            targets=[m.AssignTarget(m.Attribute(value=m.Name("self")))],
            value=m.Call(),
        )
        for node in m.findall(self.node, pattern):
            assert isinstance(node, cst.Assign)
            assert isinstance(node.value, cst.Call)
            target = node.targets[0].target
            assert isinstance(target, cst.Attribute)
            found.setdefault(target.attr.value, code(node.value.func))
        return found

    def norm_adds(self, attribute: str) -> bool:
        """Whether `self.<attribute>(x, residual)` adds residual to x."""
        made_by = self.builds.get(attribute, "")
        return made_by in self.module.adding_norms
