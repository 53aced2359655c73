# SPDX-License-Identifier: Apache-2.0
"""Reads the architecture names of upstream's model registry."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fork.architectures.sources import Place
from fork.errors import BuildFailure

REGISTRY = "vllm/model_executor/models/registry.py"
TEXT, MULTIMODAL, LIBRARY = "text", "multimodal", "transformers"
_POOLING = "a pooling model: nothing is generated"
_DRAFT = "a draft model: its proposals are checked by the model that is tapped"
_TABLES = {
    "_TEXT_GENERATION_MODELS": TEXT,
    "_MULTIMODAL_MODELS": MULTIMODAL,
    "_TRANSFORMERS_SUPPORTED_MODELS": LIBRARY,
    "_TRANSFORMERS_BACKEND_MODELS": LIBRARY,
    "_EMBEDDING_MODELS": "pooling",
    "_LATE_INTERACTION_MODELS": "pooling",
    "_REWARD_MODELS": "pooling",
    "_TOKEN_CLASSIFICATION_MODELS": "pooling",
    "_SEQUENCE_CLASSIFICATION_MODELS": "pooling",
    "_SPECULATIVE_DECODING_MODELS": "draft",
}
NOT_GENERATING = {"pooling": _POOLING, "draft": _DRAFT}
"""By kind of table: why its architectures have no hook points."""
_ALL = "_VLLM_MODELS"


@dataclass(frozen=True, slots=True)
class Name:
    """One architecture name that a model's configuration may have."""

    architecture: str
    table: str
    """Kind of table: text, multimodal, transformers, pooling or draft."""
    place: Place
    """The model class."""


def names(root: Path) -> list[Name]:
    """Every name in the registry of the release at `root`, each once.

    Raises:
        BuildFailure: the registry has an unknown table.
    """
    tree = ast.parse((root / REGISTRY).read_text(encoding="utf-8"))
    tables = dict(_tables(tree))
    unknown = [name for name in _merged(tables.pop(_ALL)) if name not in _TABLES]
    if unknown:
        raise BuildFailure(
            f"{REGISTRY} has tables of architectures that fork/architectures/"
            f"registry.py does not know: {', '.join(unknown)}; say there what they are"
        )
    found: dict[str, Name] = {}
    for table, kind in _TABLES.items():  # a model that can generate is listed as such
        for name, module, cls in _entries(tables[table]) if table in tables else ():
            found.setdefault(name, Name(name, kind, (_file(root, module), cls)))
    return list(found.values())


def _tables(tree: ast.Module) -> Iterator[tuple[str, ast.Dict]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _entries(node: ast.Dict) -> Iterator[tuple[str, str, str]]:
    """Name, module and class of each literal entry."""
    for key, value in zip(node.keys, node.values, strict=True):
        if key is not None:  # None stands for `**other_table`
            module, cls = ast.literal_eval(value)
            yield ast.literal_eval(key), module, cls


def _merged(node: ast.Dict) -> list[str]:
    """The names of the tables that `{**a, **b}` merges."""
    return [ast.unparse(value) for value in node.values]


def _file(root: Path, module: str) -> str:
    dotted = module if "." in module else f"vllm.model_executor.models.{module}"
    path = Path(*dotted.split("."))
    if (root / path).is_dir():
        path = path / "__init__"
    return f"{path.as_posix()}.py"
