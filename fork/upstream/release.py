# SPDX-License-Identifier: Apache-2.0
"""Unpacks an upstream wheel into the cache."""

import os
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fork.errors import BuildFailure
from fork.paths import cache_root
from fork.upstream.fetch import sha256_of, wheel_version

HARD_LINKED_BYTES = 1 << 20
"""Files of at least this size are hard-linked into trees.

The cached file is therefore read-only. Smaller files are copied and may be edited in
the tree.
"""


def copy_or_link(source: Path, target: Path) -> None:
    """Copy a file, or hard-link a large one."""
    if source.stat().st_size >= HARD_LINKED_BYTES:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            pass
        else:
            return
    shutil.copy2(source, target)


@dataclass(frozen=True, slots=True)
class Release:
    """An unpacked upstream wheel, which is never changed."""

    version: str
    sha256: str
    root: Path
    tags: str
    """Python, ABI and platform tags of the wheel, as in its file name."""

    def files(self) -> list[str]:
        """Paths of the package's files, sorted."""
        package = self.root / "vllm"
        found = (
            Path(folder) / name
            for folder, _, names in os.walk(package)
            for name in names
        )
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    @property
    def dist_info(self) -> Path:
        """The wheel's metadata folder."""
        return next(self.root.glob("*.dist-info"))


def unpack(
    wheel: Path, sha256: str | None = None, python_only: bool = False
) -> Release:
    """Unpack a wheel into the cache, unless it is there already.

    Args:
        wheel: the wheel file.
        sha256: its hash; computed if None.
        python_only: whether to omit libraries and data, which `check` does not read.
    """
    sha256 = sha256 or sha256_of(wheel)
    root = cache_root() / "unpacked" / (sha256 + ("-python" if python_only else ""))
    if not root.exists():
        _unpack_into(wheel, root, python_only)
    tags = "-".join(wheel.stem.split("-")[-3:])
    return Release(wheel_version(wheel), sha256, root, tags)


def _unpack_into(wheel: Path, root: Path, python_only: bool) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=root.parent, prefix="partial-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if not python_only or info.filename.endswith((".py", "METADATA")):
                    _extract(archive, info, partial)
        partial.chmod(0o755)
        _move(partial, root)
    except zipfile.BadZipFile as error:
        raise BuildFailure(f"{wheel}: not a readable wheel ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, root: Path) -> None:
    try:
        partial.rename(root)
    except OSError:  # a concurrent build has unpacked it already
        if not root.exists():
            raise


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, root: Path) -> None:
    path = Path(archive.extract(info, root))
    if info.is_dir():
        return
    is_executable = bool((info.external_attr >> 16) & 0o111)
    mode = 0o555 if is_executable else 0o444
    path.chmod(mode if info.file_size >= HARD_LINKED_BYTES else mode | 0o200)
