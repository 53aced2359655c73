# SPDX-License-Identifier: Apache-2.0
"""Which of upstream's architectures have hook points, computed from its sources."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from fork.architectures.sources import Place, Reached, Sources
from fork.weave.decoder_layers import (
    RefusedLayer,
    TappedLayer,
    WeaveResult,
    weave_module,
)
from fork.weave.rules import LOOPS, MODELS

Weave = Callable[[str, str], WeaveResult]
REGISTRY = "vllm/model_executor/models/registry.py"
_TABLES = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "multimodal",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers",
    "_TRANSFORMERS_BACKEND_MODELS": "transformers",
}
TRANSFORMERS = (
    "the layers are modules of the transformers library, told apart when the model "
    "is loaded"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One decoder-layer class of an architecture."""

    module: str
    name: str
    points: tuple[str, ...]
    rule: str = ""
    refused: str = ""
    """Why it has no hook points; empty if it has."""
    unless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureReport:
    """One architecture of upstream's registry."""

    architecture: str
    table: str
    module: str
    layers: tuple[LayerReport, ...]
    refused: str = ""
    """Why the architecture has no hook points at all; empty if it has."""
    note: str = ""


def reports(root: Path, weave: Weave = weave_module) -> list[ArchitectureReport]:
    """A report for every generating architecture, in the registry's order.

    Args:
        root: Where the release is unpacked.
        weave: What weaves a module, given its source and path; it may remember.
    """
    sources = Sources(root)
    layers = _Layers(root, weave)
    return [
        _report(architecture, table, place, sources, layers)
        for architecture, table, place in _architectures(root)
    ]


def _architectures(root: Path) -> Iterator[tuple[str, str, Place]]:
    tree = ast.parse((root / REGISTRY).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], ast.Name
        ):
            continue
        table = _TABLES.get(node.targets[0].id)
        if table is not None:
            for architecture, (module, cls) in ast.literal_eval(node.value).items():
                yield architecture, table, (_file(root, module), cls)


def _file(root: Path, module: str) -> str:
    dotted = module if "." in module else f"vllm.model_executor.models.{module}"
    path = Path(*dotted.split("."))
    if (root / path).is_dir():
        path = path / "__init__"
    return f"{path.as_posix()}.py"


class _Layers:
    """The weave's results, by the place of each class."""

    def __init__(self, root: Path, weave: Weave) -> None:
        self.root = root
        self.weave = weave
        self.of = lru_cache(maxsize=None)(self._of)

    def _of(self, path: str) -> dict[str, TappedLayer | RefusedLayer]:
        file = self.root / path
        if not file.exists():
            return {}
        result = self.weave(file.read_text(encoding="utf-8"), path)
        found: list[TappedLayer | RefusedLayer] = [*result.layers, *result.refused]
        return {layer.name: layer for layer in found}


def _report(
    architecture: str, table: str, place: Place, sources: Sources, layers: _Layers
) -> ArchitectureReport:
    if table == "transformers":
        return ArchitectureReport(
            architecture=architecture,
            table=table,
            module=place[0],
            layers=(),
            note=TRANSFORMERS,
        )
    reached = sources.reach(place)
    found = list(_found(reached, layers))
    notes = [LOOPS[f"{p}:{n}"] for p, n in reached.used if f"{p}:{n}" in LOOPS]
    if reached.wraps:
        named = ", ".join(sorted(reached.architectures))
        wrapped = named or "the one its configuration names"
        notes.append(f"wraps a language model: {wrapped}")
    return ArchitectureReport(
        architecture=architecture,
        table=table,
        module=place[0],
        layers=tuple(found),
        refused=_refusal(architecture, found, reached.wraps),
        note="; ".join(dict.fromkeys(notes)),
    )


def _found(reached: Reached, layers: _Layers) -> Iterator[LayerReport]:
    """The layer classes among what is used; of alternatives the one chosen."""
    chosen: set[Place] = set()
    for choices in reached.choices:
        chosen = {place for place in choices if place[1] in layers.of(place[0])}
        if chosen:
            break
    for path, name in sorted({*reached.used, *chosen}):
        layer = layers.of(path).get(name)
        if layer is not None and getattr(layer, "is_layer", True):
            yield _layer(path, layer)


def _refusal(architecture: str, found: list[LayerReport], wraps: bool) -> str:
    if architecture in MODELS:
        return MODELS[architecture]
    if not found:
        return "" if wraps else "no decoder layer was found"
    reasons = {layer.refused for layer in found}
    return "; ".join(sorted(reasons)) if all(reasons) else ""


def _layer(path: str, layer: TappedLayer | RefusedLayer) -> LayerReport:
    if isinstance(layer, RefusedLayer):
        return LayerReport(
            module=path, name=layer.name, points=(), refused=layer.reason
        )
    return LayerReport(
        module=path,
        name=layer.name,
        points=layer.points,
        rule=layer.rule,
        unless=layer.unless,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the reports for the release unpacked at a given root."""
    parser = argparse.ArgumentParser(prog="python -m fork models", description=__doc__)
    parser.add_argument("root", type=Path, help="root of an unpacked release")
    parser.add_argument("--json", action="store_true", help="print a JSON report")
    options = parser.parse_args(argv)
    show(reports(options.root), options.json)
    return 0


def show(rows: list[ArchitectureReport], as_json: bool) -> None:
    """Print the reports as JSON or as lines."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        print(f"{row.architecture} ({row.table})")
        for layer in row.layers:
            what = (
                f"refused: {layer.refused}" if layer.refused else " ".join(layer.points)
            )
            print(f"    {layer.module.removesuffix('.py')}:{layer.name}: {what}")
            for extra in (layer.rule and f"rule: {layer.rule}", *layer.unless):
                if extra:
                    print(f"        {extra}")
        if row.refused and not row.layers:
            print(f"    refused: {row.refused}")
        if row.note:
            print(f"    {row.note}")
