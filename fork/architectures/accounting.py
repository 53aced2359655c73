# SPDX-License-Identifier: Apache-2.0
"""Fails the build for architectures with neither decoder layers nor a listed reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fork.architectures.registry import LIBRARY, NOT_GENERATING, REGISTRY, names
from fork.architectures.sources import Sources
from fork.errors import BuildFailure, Fault
from fork.upstream.release import Release
from fork.weave.rules import MODELS
from fork.weaving.cache import (
    architectures_digest,
    digest_of,
    keep,
    recall,
    weave_digest,
)
from fork.weaving.weaver import WovenFile

_ORIGIN = "fork/weave/rules.py"


def architecture_faults(release: Release, woven: list[WovenFile]) -> list[Fault]:
    """A fault for each generating architecture that reaches no decoder layer.

    Args:
        release: the release whose registry is read.
        woven: the results of weaving its files.
    """
    if not (release.root / REGISTRY).exists() or any(w.faults for w in woven):
        return []
    layers = {w.module: frozenset(w.layers) for w in woven if w.layers}
    shown = repr(sorted((m, sorted(found)) for m, found in layers.items()))
    parts = (release.sha256.encode(), architectures_digest(), weave_digest())
    key = digest_of([*parts, shown.encode()])
    record = recall(key)
    if record is None:
        record = {"sentences": list(_sentences(release, layers))}
        keep(key, record)
    return [
        Fault(_ORIGIN, REGISTRY, "Architecture", text) for text in record["sentences"]
    ]


def _sentences(release: Release, layers: Mapping[str, frozenset[str]]) -> list[str]:
    try:
        unknown = unknown_architectures(release.root, layers)
    except BuildFailure as error:  # the registry has an unknown table
        return [f"{error}."]
    return [
        f"{_ORIGIN}: {REGISTRY} of vLLM {release.version} has {name}, but no decoder "
        f"layer was found from {place}: teach fork/architectures/sources.py the way "
        "to it, or add the architecture to MODELS with the reason."
        for name, place in unknown
    ]


def unknown_architectures(
    root: Path, layers: Mapping[str, frozenset[str]]
) -> list[tuple[str, str]]:
    """Name and model class of each architecture that reaches no decoder layer.

    Args:
        root: the folder of the unpacked release.
        layers: names of the decoder-layer classes by module, including refused ones.
    """
    sources = Sources(root)
    unknown = []
    for name in names(root):
        if name.table in (LIBRARY, *NOT_GENERATING) or name.architecture in MODELS:
            continue
        reached = sources.reach(name.place)
        places = [*reached.used, *(p for chosen in reached.choices for p in chosen)]
        known = any(cls in layers.get(module, ()) for module, cls in places)
        if not known and not reached.wraps:
            unknown.append((name.architecture, ":".join(name.place)))
    return unknown
