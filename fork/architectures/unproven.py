# SPDX-License-Identifier: Apache-2.0
"""Architectures that no case of the parity suite proves by name, and what stands in.

Either the layers that they run are proven under another name, or another model's proof
is theirs, or a case says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fork.architectures.registry import LIBRARY, NOT_GENERATING
from fork.architectures.reports import ArchitectureReport

Results = Mapping[str, Mapping[str, Any]]
"""Results of the parity suite: an entry per architecture, dtype and device."""
ANY_WRAPPED = "the proof of the language model that their configuration names is theirs"
ANY_LIBRARY = "the proof of the model that upstream's backend loads is theirs"


def stands_in(rows: Iterable[ArchitectureReport], results: Results) -> dict[str, str]:
    """What stands in for a proof of each architecture that has hook points and none.

    An empty text stands for nothing: then a case must give the reason.
    """
    rows = list(rows)
    known = {entry["architecture"] for entry in results.values() if _is_proven(entry)}
    proven: dict[tuple[str, str], str] = {}
    for row in rows:
        for layer in row.layers if row.architecture in known else ():
            proven.setdefault((layer.module, layer.name), row.architecture)
    return {
        row.architecture: _instead(row, proven)
        for row in rows
        if not row.refused
        and row.table not in NOT_GENERATING
        and row.architecture not in known
    }


def unexplained(rows: Iterable[ArchitectureReport], results: Results) -> Iterator[str]:
    """The architectures with neither a proof, nor a substitute, nor a reason."""
    given = {entry["architecture"] for entry in results.values() if entry.get("cases")}
    for architecture, text in stands_in(rows, results).items():
        if not text and architecture not in given:
            yield architecture


def _is_proven(entry: Mapping[str, Any]) -> bool:
    return entry.get("max_relative_error") is not None


def _instead(row: ArchitectureReport, proven: Mapping[tuple[str, str], str]) -> str:
    if not row.layers:
        return ANY_LIBRARY if row.table == LIBRARY else ANY_WRAPPED
    names = [proven.get((layer.module, layer.name)) for layer in row.layers]
    found = sorted({name for name in names if name is not None})
    whole = None not in names
    return f"their layers are those of {' and '.join(found)}" if whole else ""
