# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

from fork.building.builder import build_tree
from fork.building.packaging import copy_contents
from tests.fork._checkout import Mini


def test_a_distribution_holds_copies_and_no_links(mini: Mini, tmp_path: Path) -> None:
    built = build_tree(mini.order(), mini.out)
    target = tmp_path / "lib"
    copy_contents(built, mini.out, target)
    assert [path.name for path in target.iterdir()] == ["vllm"]
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "vllm/ours/new.py").read_text() == "VALUE = 1\n"
    assert "count(y)" in (target / "vllm/engine.py").read_text()
    assert os.access(target / "vllm/tool", os.X_OK)
    assert (target / "vllm/big.so").stat().st_size == 1 << 20


def test_packages_beside_ours_are_installed(mini: Mini, tmp_path: Path) -> None:
    mini.write("packages/other/__init__.py", "NAME = 1\n")
    built = build_tree(mini.order(), mini.out)
    assert (mini.out / "other/__init__.py").is_symlink()
    target = tmp_path / "lib"
    copy_contents(built, mini.out, target)
    assert sorted(path.name for path in target.iterdir()) == ["other", "vllm"]
    assert (target / "other/__init__.py").read_text() == "NAME = 1\n"
