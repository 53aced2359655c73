# SPDX-License-Identifier: Apache-2.0
"""Reports the hook points of upstream's architectures, computed from its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fork.architectures.library import Library
from fork.architectures.registry import LIBRARY, NOT_GENERATING, Name, names
from fork.architectures.sources import Place, Reached, Sources
from fork.weave.decoder_layers import Layer, WeaveResult, weave_module
from fork.weave.rules import LOOPS, MODELS

Weave = Callable[[str, str], WeaveResult]
UNKNOWN = "no decoder layer was found"
_ANY_WRAPPED = "wraps the language model that its configuration names"
_ANY_LIBRARY = "woven when the model is loaded, whichever it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureReport:
    """One architecture of upstream's registry."""

    architecture: str
    table: str
    """Kind of table: text, multimodal, transformers, pooling or draft."""
    module: str
    layers: tuple[Layer, ...] = ()
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

    def running(self, place: Place) -> Layer | None:
        """The result of a class, or that of the base class whose `forward` it runs."""
        layer = self.of(place[0]).get(place[1])
        if layer is None or not layer.inherits:
            return layer
        for base in self.sources.resolve((place[0], layer.inherits)):
            woven = self.running(base)
            if woven is not None and not woven.refused:
                return replace(woven, name=layer.name)
        return layer

    def _of(self, path: str) -> dict[str, Layer]:
        file = self.sources.root / path
        if not file.exists():
            return {}
        result = self.weave(file.read_text(encoding="utf-8"), path)
        return {layer.name: layer for layer in (*result.layers, *result.refused)}


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
    return replace(
        row,
        layers=tuple(found),
        refused=_refusal(name.architecture, found, False),
        note=f"layers of transformers {library.version}, woven when loaded",
    )


def _unwrapped(rows: list[ArchitectureReport]) -> list[ArchitectureReport]:
    """Give each wrapping architecture the layers of those that it wraps."""
    known = {row.architecture: row for row in rows}
    done = []
    for row in rows:
        inner = [known[name] for name in row.wraps if name in known]
        if inner and not row.layers:
            every = {(x.module, x.name): x for other in inner for x in other.layers}
            reasons = [other.refused for other in inner]
            refused = "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""
            row = replace(
                row, layers=tuple(every.values()), refused=row.refused or refused
            )
        done.append(row)
    return done


def _found(reached: Reached, layers: _Layers) -> Iterator[Layer]:
    """The layer classes among the used definitions, and the nearest chosen ones."""
    chosen: set[Place] = set()
    for choices in reached.choices:
        chosen = {place for place in choices if place[1] in layers.of(place[0])}
        if chosen:
            break
    for path, name in sorted({*reached.used, *chosen}):
        layer = layers.running((path, name))
        if layer is not None and layer.is_layer:
            yield replace(layer, module=path)


def _refusal(architecture: str, found: Sequence[Layer], wraps: bool) -> str:
    if architecture in MODELS:
        return MODELS[architecture]
    if not found:
        return "" if wraps else UNKNOWN
    reasons = {layer.refused for layer in found}
    return "; ".join(sorted(reasons)) if all(reasons) else ""
