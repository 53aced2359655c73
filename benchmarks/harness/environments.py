# SPDX-License-Identifier: Apache-2.0
"""A second environment that holds upstream's release in place of the fork.

It shares every dependency with the current environment, so both sides use the same
torch. It consists of links and takes about a second to make; nothing is installed.
"""

import shutil
import sysconfig
import venv
from pathlib import Path

from fork.building.builder import Order, open_release

_OURS = ("vllm", "__editable__", "__pycache__")
"""Prefixes of the fork's entries in a site folder."""


def make_upstream_environment(folder: Path) -> Path:
    """Make the environment in `folder` from scratch and return its Python.

    The pinned wheel of the release is fetched and verified as by the build.

    Raises:
        BuildFailure: the wheel is not available.
    """
    release = open_release(Order(device="cpu"))
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True, with_pip=False)
    site = _site_of(folder)
    for source in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in source.iterdir():
            # A .pth file may refer to the fork; packages do not need them.
            if not entry.name.startswith(_OURS) and entry.suffix != ".pth":
                _link(site / entry.name, entry)
    (site / "upstream.pth").write_text(f"{release.root}\n")
    return folder / "bin" / "python"


def _site_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def _link(target: Path, entry: Path) -> None:
    if not target.exists():
        target.symlink_to(entry)
