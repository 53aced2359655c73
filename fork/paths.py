# SPDX-License-Identifier: Apache-2.0
"""The paths of the fork's parts."""

import os
from pathlib import Path


class Checkout:
    """A checkout of the fork, or a miniature one in tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pins = root / "fork" / "upstream.toml"
        """The file that pins the upstream release."""
        self.edits = root / "fork" / "edits"
        """Edit files, at the paths of the modules they edit."""
        self.overlay = root / "vllm"
        """The files that the fork adds."""
        self.packages = root / "packages"
        """Packages next to `vllm`, under the import names of other systems' scripts."""
        self.weave = root / "fork" / "weave"
        """The decoder-layer weave."""
        self.parity_results = root / "tests" / "parity" / "results.json"
        """The results of the parity suite, by architecture."""
        self.requirements = root / "requirements" / "common.txt"
        """The fork's own run-time requirements."""
        self.license = root / "LICENSE"
        """The fork's own licence."""

    def tree(self, device: str, upstream: str | None = None) -> Path:
        """The default path of the built tree; a release that is named has its own."""
        return self.root / "build" / (f"{device}-{upstream}" if upstream else device)


HERE = Checkout(Path(__file__).resolve().parent.parent)


def cache_root() -> Path:
    """The cache folder for wheels, unpacked releases and woven files."""
    chosen = os.environ.get("CLEARBOX_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "clearbox"
