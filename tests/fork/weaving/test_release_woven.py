# SPDX-License-Identifier: Apache-2.0
"""The real release, woven whole."""

import pytest

from fork.building.builder import Built, Order, build
from fork.building.contents import Text
from fork.errors import BuildFailure
from fork.paths import HERE
from fork.upstream.pins import load_upstream
from fork.weaving.edit_files import edit_paths, load_edit_file


@pytest.fixture(scope="module")
def built() -> Built:
    return build(Order(device="cpu"))


def test_every_edit_file_changes_its_module(built: Built) -> None:
    version = load_upstream(HERE.pins).version
    for module, path in edit_paths(HERE.edits).items():
        edits = load_edit_file(module, path).edits
        applies = any(edit.applies_to(version) for edit in edits)
        assert (module in built.woven) == applies, module


def test_every_woven_file_compiles(built: Built) -> None:
    for path, content in built.contents.items():
        if isinstance(content, Text) and path.endswith(".py"):
            compile(content.data, path, "exec", dont_inherit=True)


def test_every_edit_is_used_and_says_why() -> None:
    for module, path in edit_paths(HERE.edits).items():
        file = load_edit_file(module, path)
        assert all(len(edit.why.split()) >= 3 for edit in file.edits), file.path


def test_no_added_file_is_at_the_root_of_the_package(built: Built) -> None:
    assert not (HERE.overlay / "__init__.py").exists()
    assert built.release.version == load_upstream(HERE.pins).version


def test_both_devices_are_pinned_for_both_machines() -> None:
    upstream = load_upstream(HERE.pins)
    for device in ("cpu", "cuda"):
        for machine in ("x86_64", "aarch64"):
            pin = upstream.pin(device, machine)
            assert len(pin.sha256) == 64
            assert upstream.version in pin.file
    with pytest.raises(BuildFailure, match="build upstream"):
        upstream.pin("cuda", "ppc64le")


def test_the_next_release_is_pinned_for_cuda() -> None:
    upstream = load_upstream(HERE.pins, "0.33.0")
    assert {device for device, _ in upstream.wheels} == {"cuda"}
    assert all(upstream.version in pin.file for pin in upstream.wheels.values())
