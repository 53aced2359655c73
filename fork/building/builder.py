# SPDX-License-Identifier: Apache-2.0
"""Build the fork: wheel, weave, overlay, tree."""

from dataclasses import dataclass, replace
from pathlib import Path

from fork.architectures.accounting import architecture_faults
from fork.building.contents import Contents, added_files, assemble, shadowing_faults
from fork.building.metadata import (
    Metadata,
    dist_info_files,
    fork_metadata,
    version_module,
)
from fork.building.native import native_files
from fork.building.tree import update_tree
from fork.errors import BuildFailure, Fault
from fork.paths import HERE, Checkout
from fork.progress import step
from fork.upstream.fetch import fetch, sha256_of, verify, wheel_version
from fork.upstream.pins import load_upstream, machine_name
from fork.upstream.release import Release, unpack
from fork.weaving.weaver import weave_release


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
        results = weave_release(order.checkout, release, order.jobs)
    faults = [fault for woven in results for fault in woven.faults]
    faults += shadowing_faults(added_files(order.checkout), release)
    with step("architectures"):
        faults += architecture_faults(release, results)
    if faults:
        raise Faulty(faults)
    woven = {w.module: w.source for w in results if w.source is not None}
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
        update = update_tree(out, built.contents)
    added = len(added_files(order.checkout))
    print(
        f"  {len(built.woven)} files woven, {added} added; "
        f"{update.placed} placed, {update.removed} removed"
    )
    return built
