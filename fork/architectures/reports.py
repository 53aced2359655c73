# SPDX-License-Identifier: Apache-2.0
"""Reports the hook points of upstream's architectures, computed from its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fork.architectures.library import Library, LibraryLayer
from fork.architectures.registry import LIBRARY, NOT_GENERATING, Name, names
from fork.architectures.sources import Place, Reached, Sources
from fork.weave.decoder_layers import (
    RefusedLayer,
    TappedLayer,
    WeaveResult,
    weave_module,
)
from fork.weave.rules import LOOPS, MODELS

Weave = Callable[[str, str], WeaveResult]
UNKNOWN = "no decoder layer was found"
_ANY_WRAPPED = "wraps the language model that its configuration names"
_ANY_LIBRARY = "woven when the model is loaded, whichever it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One decoder-layer class of an architecture."""

    module: str
    name: str
    points: tuple[str, ...]
    rule: str = ""
    """Why the analysis needed a rule; empty if it did not."""
    refused: str = ""
    """Why it has no hook points; empty if it has some."""
    unless: tuple[str, ...] = ()
    """Configurations that are refused when the server starts."""
    lacks: tuple[tuple[str, str], ...] = ()
    """The optional points that it does not have, each with the reason."""
    sometimes: tuple[tuple[str, str], ...] = ()
    """The points that only some layers have, each with the reason of the others."""
    partial: tuple[str, ...] = ()
    """The points that it has with one tensor-parallel rank only."""
    meaning: str = ""
    """The meaning of `post_attn` in a block without a token mixer or without an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureReport:
    """One architecture of upstream's registry."""

    architecture: str
    table: str
    """Kind of table: text, multimodal, transformers, pooling or draft."""
    module: str
    layers: tuple[LayerReport, ...] = ()
    refused: str = ""
    """Why the architecture has no hook points at all; empty if it has some."""
    wraps: tuple[str, ...] = ()
    """Architectures whose layers it runs, as far as its source names them."""
    note: str = ""


def reports(
    root: Path, weave: Weave = weave_module, library: Library | None = None
) -> list[ArchitectureReport]:
    """A report for every architecture, in the order of the registry's tables.

    Args:
        root: the folder of the unpacked release.
        weave: weaves a module, given its source and path; may cache results.
        library: the Transformers library whose layers upstream's backend runs.
    """
    sources = Sources(root)
    layers = _Layers(sources, weave)
    rows = [_report(name, sources, layers, library) for name in names(root)]
    return _unwrapped(rows)


class _Layers:
    """The results of the weave, by place of the class."""

    def __init__(self, sources: Sources, weave: Weave) -> None:
        self.sources = sources
        self.weave = weave
        self.of = lru_cache(maxsize=None)(self._of)

    def running(self, place: Place) -> TappedLayer | RefusedLayer | None:
        """The result of a class, or that of the base class whose `forward` it runs."""
        layer = self.of(place[0]).get(place[1])
        if not isinstance(layer, TappedLayer) or not layer.inherits:
            return layer
        for base in self.sources.resolve((place[0], layer.inherits)):
            woven = self.running(base)
            if isinstance(woven, TappedLayer):
                return replace(woven, name=layer.name)
        return layer

    def _of(self, path: str) -> dict[str, TappedLayer | RefusedLayer]:
        file = self.sources.root / path
        if not file.exists():
            return {}
        result = self.weave(file.read_text(encoding="utf-8"), path)
        found: list[TappedLayer | RefusedLayer] = [*result.layers, *result.refused]
        return {layer.name: layer for layer in found}


def _report(
    name: Name, sources: Sources, layers: _Layers, library: Library | None
) -> ArchitectureReport:
    row = ArchitectureReport(
        architecture=name.architecture, table=name.table, module=name.place[0]
    )
    if name.table in NOT_GENERATING:
        return replace(row, refused=NOT_GENERATING[name.table])
    if name.table == LIBRARY:
        return _of_library(row, name, library)
    reached = sources.reach(name.place)
    found = tuple(_found(reached, layers))
    notes = [LOOPS[f"{p}:{n}"] for p, n in reached.used if f"{p}:{n}" in LOOPS]
    wrapped = tuple(sorted(reached.architectures))
    if reached.wraps:
        notes.append(f"wraps {', '.join(wrapped)}" if wrapped else _ANY_WRAPPED)
    return replace(
        row,
        layers=found,
        refused=_refusal(name.architecture, found, reached.wraps),
        wraps=wrapped,
        note="; ".join(dict.fromkeys(notes)),
    )


def _of_library(
    row: ArchitectureReport, name: Name, library: Library | None
) -> ArchitectureReport:
    if name.place[1].endswith(("EmbeddingModel", "SequenceClassification")):
        return replace(row, refused=NOT_GENERATING["pooling"])
    found = library.layers(name.architecture) if library is not None else []
    if library is None or not found:
        return replace(row, note=_ANY_LIBRARY)
    layers = tuple(map(_library_layer, found))
    return replace(
        row,
        layers=layers,
        refused=_refusal(name.architecture, layers, False),
        note=f"layers of transformers {library.version}, woven when loaded",
    )


def _library_layer(layer: LibraryLayer) -> LayerReport:
    if layer.tapped is None:
        return LayerReport(
            module=layer.module, name=layer.name, points=(), refused=layer.refused
        )
    return replace(_layer(layer.module, layer.tapped), rule="")


def _unwrapped(rows: list[ArchitectureReport]) -> list[ArchitectureReport]:
    """Give each wrapping architecture the layers of those that it wraps."""
    known = {row.architecture: row for row in rows}
    done = []
    for row in rows:
        inner = [known[name] for name in row.wraps if name in known]
        if inner and not row.layers:
            layers = tuple(dict.fromkeys(x for other in inner for x in other.layers))
            reasons = [other.refused for other in inner]
            refused = "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""
            row = replace(row, layers=layers, refused=row.refused or refused)
        done.append(row)
    return done


def _found(reached: Reached, layers: _Layers) -> Iterator[LayerReport]:
    """The layer classes among the used definitions, and the nearest chosen ones."""
    chosen: set[Place] = set()
    for choices in reached.choices:
        chosen = {place for place in choices if place[1] in layers.of(place[0])}
        if chosen:
            break
    for path, name in sorted({*reached.used, *chosen}):
        layer = layers.running((path, name))
        if layer is not None and getattr(layer, "is_layer", True):
            yield _layer(path, layer)


def _refusal(architecture: str, found: tuple[LayerReport, ...], wraps: bool) -> str:
    if architecture in MODELS:
        return MODELS[architecture]
    if not found:
        return "" if wraps else UNKNOWN
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
        lacks=tuple(layer.lacks.items()),
        sometimes=tuple(layer.sometimes.items()),
        partial=layer.partial,
        meaning=layer.meaning,
    )
