# SPDX-License-Identifier: Apache-2.0
"""Build the fork: wheel, weave, overlay, tree."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from fork.building.check import check
from fork.building.contents import (
    Added,
    Content,
    Contents,
    Text,
    added_files,
    assemble,
)
from fork.building.lock import only_one
from fork.building.metadata import (
    Metadata,
    dist_info_files,
    fork_metadata,
    version_module,
)
from fork.building.native import native_files
from fork.errors import BuildFailure, Fault
from fork.paths import HERE, Checkout
from fork.progress import step
from fork.upstream.fetch import fetch, sha256_of, verify, wheel_version
from fork.upstream.pins import load_upstream, machine_name
from fork.upstream.release import Release, copy_or_link, unpack

MANIFEST = ".fork-manifest.json"
_Stamp = list[str | int]
"""Fingerprint, size in bytes and mtime in nanoseconds of a file when it was placed."""


def update_tree(out: Path, contents: Contents) -> tuple[int, int]:
    """Make the folder `out` hold exactly `contents`.

    Changed files are staged and each moved into place by an atomic replacement, so that
    a running Python never sees a partial file, and bytecode of unchanged files stays
    valid. The manifest is written last: after an interrupted update the next build
    repairs the tree.

    Returns:
        How many files were placed in it, and removed from it.

    Raises:
        BuildFailure: `out` was not made by a build.
    """
    with only_one(out):
        if not out.exists():
            out.mkdir()
            _write_manifest(out, {})
        manifest = _read_manifest(out)
        if manifest is None:
            raise BuildFailure(
                f"{out} was not made by fork build: remove it or choose another --out"
            )
        return _refresh(out, contents, manifest)


def _refresh(
    out: Path, contents: Contents, manifest: dict[str, _Stamp]
) -> tuple[int, int]:
    changed = {
        path: content
        for path, content in contents.items()
        if path not in manifest or _stamp(out / path, content) != manifest[path]
    }
    gone = [path for path in manifest if path not in contents]
    if not changed and not gone:
        return 0, 0
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
    return len(changed), len(gone)


def _place(content: Content, path: Path, linked_from: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Text):
        path.write_bytes(content.data)
    elif isinstance(content, Added):
        path.symlink_to(link_target(content, linked_from))
    else:
        copy_or_link(content.path, path)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to build."""

    device: str
    upstream: str | None = None
    """A release other than the default one."""
    wheel: Path | None = None
    """A wheel to build on instead of the pinned one."""
    wheel_sha256: str | None = None
    jobs: int = 2
    checkout: Checkout = HERE


class Faulty(BuildFailure):
    """Edits, weave or overlay do not fit the release; has all faults."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(fault.sentence for fault in faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Built:
    """The fork, ready to be written to a tree."""

    release: Release
    metadata: Metadata
    woven: dict[str, str]
    contents: Contents


def open_release(order: Order) -> Release:
    """Open the wheel to build on, verified and unpacked.

    Raises:
        BuildFailure: there is none, or it is not the expected one.
    """
    upstream = load_upstream(order.checkout.pins, order.upstream)
    if order.wheel is not None:
        return _open_given(order.wheel, order.wheel_sha256, upstream.version)
    machine = machine_name()
    pin = upstream.pin(order.device, machine)
    with step(f"wheel {pin.file}"):
        wheel = fetch(pin, upstream.version, machine)
    with step("unpack"):
        return unpack(wheel, pin.sha256)


def _open_given(wheel: Path, sha256: str | None, version: str) -> Release:
    if not wheel.is_file():
        raise BuildFailure(f"--wheel {wheel}: no such file")
    found = wheel_version(wheel)
    if found.partition("+")[0] != version:
        raise BuildFailure(
            f"--wheel {wheel.name} is vLLM {found}, but the fork is to be built on "
            f"{version}: pass a wheel of {version}, or --upstream {found}"
        )
    if sha256 is None:
        sha256 = sha256_of(wheel)
        print(f"  {wheel.name} has sha256 {sha256} (pass it as --wheel-sha256 to pin)")
    else:
        verify(wheel, sha256, remedy="check the file and the value of --wheel-sha256")
    with step("unpack"):
        return unpack(wheel, sha256.lower())


def build(order: Order) -> Built:
    """Weave and overlay, in memory.

    Raises:
        Faulty: something does not fit the release.
        BuildFailure: the wheel cannot be used.
    """
    release = open_release(order)
    with step("weave"):
        report = check(order.checkout, release, order.jobs)
    if not report.fits:
        raise Faulty([fault for file in report.files for fault in file.faults])
    woven = {w.module: w.source for w in report.woven if w.source is not None}
    upstream = load_upstream(order.checkout.pins, order.upstream)
    version = upstream.fork_version(order.device)
    metadata = fork_metadata(order.checkout, release, order.device, version)
    generated = {
        "vllm/_version.py": version_module(version, upstream.version),
        **dist_info_files(metadata, release, order.checkout),
    }
    contents = assemble(order.checkout, release, woven, generated)
    return Built(release, metadata, woven, contents)


def build_tree(order: Order, out: Path) -> Built:
    """Build and write the tree; on failure the tree is unchanged."""
    built = build(order)
    native = native_files(order.checkout, order.jobs)
    built = replace(built, contents=built.contents | native)
    with step(f"tree {out}"):
        placed, removed = update_tree(out, built.contents)
    added = len(added_files(order.checkout))
    print(
        f"  {len(built.woven)} files woven, {added} added; "
        f"{placed} placed, {removed} removed"
    )
    return built
