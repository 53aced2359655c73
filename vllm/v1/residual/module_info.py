# SPDX-License-Identifier: Apache-2.0
"""Descriptions of probes, translators and SAEs that have a name on the server."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from vllm.v1.residual.tap import Tap

ModuleKind: TypeAlias = Literal["probe", "translator", "sae"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """A module's description for the front end; only workers hold its weights."""

    name: str
    kind: ModuleKind
    path: str
    width: int
    """Hidden size of the rows that it reads."""
    size: int
    """Values of a probe, features of an SAE, or layers of a translator."""
    tap: Tap | None = None
    """`(layer, hook)` that the module states as its own, or None."""
    layers: tuple[int, ...] = ()
    """Layers of a translator."""
    model: str = ""
    """The model that the file names; empty if none."""
    weights: str = ""
    """Digest of that model's weights; empty if the file does not have it."""
    selection: str = ""
    """How an SAE selects active features, see `SparseAutoencoder`."""
    active: int | None = None
    """Active features per row, for an SAE with a fixed number of them."""
    is_transcoder: bool = False
    """Whether an SAE writes at another place than it reads."""
    writes: Tap | None = None
    """`(layer, hook)` at which it writes, if its file states it."""
    width_out: int = 0
    """Hidden size of the rows that it writes."""
    fingerprint: str = ""
    """SHA-256 of the module's weights and of how it uses them."""

    def describe(self) -> dict[str, Any]:
        """A JSON-serialisable description, without the path."""
        said: dict[str, Any] = {"kind": self.kind, "width": self.width}
        said["features" if self.kind == "sae" else "size"] = self.size
        if self.tap is not None:
            said |= {"layer": self.tap[0], "hook": self.tap[1]}
        if self.layers:
            said["layers"] = list(self.layers)
        if self.kind == "sae":
            said |= {"selection": self.selection, "k": self.active}
        if self.is_transcoder and self.writes is not None:
            said["writes"] = {"layer": self.writes[0], "hook": self.writes[1]}
        return said | ({"model": self.model} if self.model else {})


T = TypeVar("T")


class Named(Generic[T]):
    """What has a name in a front end; thread-safe."""

    def __init__(self, known: Mapping[str, T]) -> None:
        self.all: Mapping[str, T] = dict(sorted(known.items()))
        """Sorted by name. It is replaced and never changed."""
        self._lock = threading.RLock()

    def put(self, name: str, one: T | None) -> None:
        """Add or replace what has a name; None removes it, if it is there."""
        with self._lock:
            known = {**self.all, name: one}
            self.all = {n: own for n, own in sorted(known.items()) if own is not None}


class KnownModules(Named[ModuleInfo]):
    """The probes, translators and SAEs of a server."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        """Start with the modules of the server's configuration."""
        super().__init__({name: ModuleInfo(**info) for name, info in described.items()})
