# SPDX-License-Identifier: Apache-2.0
"""The paths of the fork's parts."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of the fork, or a miniature one in tests."""

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
        """The files that the fork adds."""
        return self.root / "vllm"

    @property
    def packages(self) -> Path:
        """Packages next to `vllm`, under the import names of other systems' scripts."""
        return self.root / "packages"

    @property
    def weave(self) -> Path:
        """The decoder-layer weave."""
        return self.root / "fork" / "weave"

    @property
    def parity_results(self) -> Path:
        """The results of the parity suite, by architecture."""
        return self.root / "tests" / "parity" / "results.json"

    @property
    def supported_models(self) -> Path:
        """The page that lists the architectures."""
        return self.root / "docs" / "reference" / "supported_models.md"

    @property
    def requirements(self) -> Path:
        """The fork's own run-time requirements."""
        return self.root / "requirements" / "common.txt"

    @property
    def license(self) -> Path:
        """The fork's own licence."""
        return self.root / "LICENSE"

    def tree(self, device: str, upstream: str | None = None) -> Path:
        """The default path of the built tree; a release that is named has its own."""
        return self.root / "build" / (f"{device}-{upstream}" if upstream else device)


HERE = Checkout(Path(__file__).resolve().parent.parent)


def cache_root() -> Path:
    """The cache folder for wheels, unpacked releases and woven files."""
    chosen = os.environ.get("CLEARBOX_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "clearbox"
