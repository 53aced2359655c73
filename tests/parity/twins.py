# SPDX-License-Identifier: Apache-2.0
"""Architectures that the library computes under another name.

Their checkpoints are those of the library's model with other names: the reference loads
the original, upstream the renamed one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """The conversion of a library checkpoint to the other architecture."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of its configuration."""
    whole: bool = False
    """Whether `options` are the complete configuration."""
    rename: tuple[tuple[str, str], ...] = ()
    """Replacements in the names of weights, in this order."""
    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The parts of names whose weights are stacked, by the part of the new name, after
    renaming."""

    ones: Mapping[str, int] = field(default_factory=dict)
    """Sizes of norm weights that nothing reads, by name."""
    transposed: tuple[str, ...] = ()
    """Parts of the names of weights whose last two dimensions are transposed."""
    unread: tuple[str, ...] = ()
    """Parts of the names of weights that the library saves and never reads."""

    def save(self, library: Path, folder: Path) -> Path:
        """Write the twin of the checkpoint `library`."""
        folder.mkdir()
        config = json.loads((library / "config.json").read_text())
        kept = {"architectures": config["architectures"], "dtype": config["dtype"]}
        config = (kept if self.whole else config) | dict(self.options)
        (folder / "config.json").write_text(json.dumps(config))
        weights = self._fused(self._renamed(load_file(library / "model.safetensors")))
        weights |= {name: torch.ones(size) for name, size in self.ones.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _renamed(self, weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if any(part in name for part in self.unread):
                continue
            for old, new in self.rename:
                name = name.replace(old, new)
            assert name not in found, name
            if any(part in name for part in self.transposed):
                weight = weight.transpose(-1, -2).contiguous()
            found[name] = weight
        return found

    def _fused(self, weights: Weights) -> Weights:
        for whole, parts in self.fuse.items():
            firsts = [name for name in weights if parts[0] in name]
            assert firsts, parts[0]
            for first in firsts:
                names = [first.replace(parts[0], part) for part in parts]
                stacked = torch.cat([weights.pop(name) for name in names])
                weights[first.replace(parts[0], whole)] = stacked
        return weights
