# SPDX-License-Identifier: Apache-2.0
"""Writes a built tree to disk and updates it file by file.

The first build fills a temporary folder and renames it. Later builds stage changed
files and move each into place by an atomic replacement, so that a running Python never
sees a partial file, and bytecode of unchanged files stays valid. The manifest is
written last: after an interrupted update the next build repairs the tree.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fork.building.contents import Added, Compiled, Content, Contents, Original, Text
from fork.errors import BuildFailure
from fork.upstream.release import HARD_LINKED_BYTES

MANIFEST = ".fork-manifest.json"
_Stamp = list[str | int]
"""Fingerprint, size in bytes and mtime in nanoseconds of a file when it was placed."""


@dataclass(frozen=True, slots=True)
class Update:
    """How many files a build placed in its tree and removed from it."""

    placed: int
    removed: int


def update_tree(out: Path, contents: Contents) -> Update:
    """Make the folder `out` hold exactly `contents`.

    Raises:
        BuildFailure: `out` was not made by a build.
    """
    with _only_one(out):
        if not out.exists():
            return _create(out, contents)
        manifest = _read_manifest(out)
        if manifest is None:
            raise BuildFailure(
                f"{out} was not made by fork build: remove it or choose another --out"
            )
        return _refresh(out, contents, manifest)


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Hold the lock of a tree, so that builds of one tree run one at a time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create(out: Path, contents: Contents) -> Update:
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        for path, content in contents.items():
            _place(content, partial / path, linked_from=out / path)
        _write_manifest(partial, contents)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Update(placed=len(contents), removed=0)


def _refresh(out: Path, contents: Contents, manifest: dict[str, _Stamp]) -> Update:
    changed = {
        path: content
        for path, content in contents.items()
        if path not in manifest or _stamp(out / path, content) != manifest[path]
    }
    gone = [path for path in manifest if path not in contents]
    if not changed and not gone:
        return Update(0, 0)
    with tempfile.TemporaryDirectory(dir=out, prefix=".staging-") as folder:
        staging = Path(folder)
        for path, content in changed.items():
            _place(content, staging / path, linked_from=out / path)
        for path in gone:
            _remove(out, path)
        for path in changed:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / path, out / path)
            _drop_bytecode(out / path)
    _write_manifest(out, contents)
    return Update(placed=len(changed), removed=len(gone))


def _place(content: Content, path: Path, linked_from: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Text):
        path.write_bytes(content.data)
    elif isinstance(content, Added):
        path.symlink_to(link_target(content, linked_from))
    elif isinstance(content, Compiled) or not _link(content, path):
        shutil.copy2(content.path, path)


def _link(content: Original, path: Path) -> bool:
    if content.path.stat().st_size < HARD_LINKED_BYTES:
        return False
    try:
        os.link(content.path, path)
    except OSError:  # another file system, or one without hard links
        return False
    return True


def link_target(content: Added, linked_from: Path) -> str:
    """The target of a relative link, which stays valid if the checkout is moved."""
    return os.path.relpath(content.path.resolve(), linked_from.parent.resolve())


def _remove(out: Path, path: str) -> None:
    target = out / path
    target.unlink(missing_ok=True)
    _drop_bytecode(target)
    for folder in target.parents:
        if folder == out or not _is_spent(folder):
            return
        shutil.rmtree(folder)


def _is_spent(folder: Path) -> bool:
    """Whether a folder contains nothing but bytecode."""
    return all(child.name == "__pycache__" for child in folder.iterdir())


def _drop_bytecode(path: Path) -> None:
    """Delete bytecode, as its check by whole seconds is too coarse for rebuilds."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _stamp(path: Path, content: Content) -> _Stamp:
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return []
    return [content.fingerprint, stat.st_size, stat.st_mtime_ns]


def _write_manifest(out: Path, contents: Contents) -> None:
    manifest = {path: _stamp(out / path, item) for path, item in contents.items()}
    partial = out / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest))
    partial.replace(out / MANIFEST)


def _read_manifest(out: Path) -> dict[str, _Stamp] | None:
    try:
        manifest: dict[str, _Stamp] = json.loads((out / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest
