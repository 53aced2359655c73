# SPDX-License-Identifier: Apache-2.0
"""Where the fork's parts lie."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of the fork; tests make miniature ones."""

    root: Path

    @property
    def pins(self) -> Path:
        """The file that pins the upstream release."""
        return self.root / "fork" / "upstream.toml"

    @property
    def edits(self) -> Path:
        """Edit files, at the paths of the modules they edit."""
        return self.root / "fork" / "edits"

    @property
    def overlay(self) -> Path:
        """The files the fork adds."""
        return self.root / "vllm"

    @property
    def packages(self) -> Path:
        """Packages beside `vllm`, by whose names other systems' scripts import."""
        return self.root / "packages"

    @property
    def weave(self) -> Path:
        """The weave of decoder layers."""
        return self.root / "fork" / "weave"

    @property
    def parity_results(self) -> Path:
        """What the parity suite found, architecture by architecture."""
        return self.root / "tests" / "parity" / "results.json"

    @property
    def supported_models(self) -> Path:
        """The page that lists the architectures."""
        return self.root / "docs" / "supported_models.md"

    @property
    def requirements(self) -> Path:
        """What the fork needs at run time beyond upstream."""
        return self.root / "requirements" / "common.txt"

    @property
    def license(self) -> Path:
        """The fork's own licence."""
        return self.root / "LICENSE"

    def tree(self, device: str) -> Path:
        """Default place of the built tree."""
        return self.root / "build" / device


HERE = Checkout(Path(__file__).resolve().parent.parent)


def cache_root() -> Path:
    """Where wheels, unpacked releases and woven files are kept between builds."""
    chosen = os.environ.get("CLEARBOX_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "clearbox"
