# SPDX-License-Identifier: Apache-2.0
"""A second environment that holds upstream's release in place of the fork.

It shares every dependency with the environment that runs this, so both sides use
the same torch. It is made of links in about a second; nothing is installed.
"""

import shutil
import sysconfig
import venv
from pathlib import Path

from fork.building.builder import Order, open_release

_OURS = ("vllm", "__editable__", "__pycache__")
"""Beginnings of the names under which a site folder holds the fork."""


def make_upstream_environment(folder: Path) -> Path:
    """Make the environment anew in `folder`; its Python.

    The pinned wheel of the release is fetched and verified as the build does it.

    Raises:
        BuildFailure: the wheel cannot be had.
    """
    release = open_release(Order(device="cpu"))
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True, with_pip=False)
    site = _site_of(folder)
    for source in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in source.iterdir():
            # A .pth file may lead to the fork; packages need none.
            if not entry.name.startswith(_OURS) and entry.suffix != ".pth":
                _link(site / entry.name, entry)
    (site / "upstream.pth").write_text(f"{release.root}\n")
    return folder / "bin" / "python"


def _site_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def _link(target: Path, entry: Path) -> None:
    if not target.exists():
        target.symlink_to(entry)
