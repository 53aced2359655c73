# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest

from fork.building import native
from fork.building.builder import build_tree
from fork.building.packaging import copy_contents
from fork.errors import BuildFailure
from tests.fork._checkout import Mini

MODULE = f"{native.FOLDER}/_native.so"


@pytest.fixture
def with_sources(mini: Mini) -> Mini:
    mini.write("CMakeLists.txt", "project(mini)\n")
    mini.write("csrc/code.cpp", "int value = 1;\n")
    return mini


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The compiled sources; the stand-in compiler copies them."""
    seen: list[str] = []

    def compile_(checkout: object, jobs: int) -> Path:
        source = checkout.root / "csrc/code.cpp"  # type: ignore[attr-defined]
        seen.append(source.read_text())
        return Path(shutil.copy(source, tmp_path / "_native.so"))

    monkeypatch.setattr(native, "_compile", compile_)
    monkeypatch.setattr(native, "_missing_tools", lambda: None)
    return seen


def test_a_tree_and_a_distribution_have_the_module(
    with_sources: Mini, compiles: list[str], tmp_path: Path
) -> None:
    built = build_tree(with_sources.order(), with_sources.out)
    copy_contents(built, with_sources.out, tmp_path / "lib")
    for root in (with_sources.out, tmp_path / "lib"):
        assert (root / MODULE).read_text() == "int value = 1;\n"
        assert not (root / MODULE).is_symlink()


def test_sources_are_compiled_once_per_state(
    with_sources: Mini, compiles: list[str]
) -> None:
    for text in ("int value = 2;\n", "int value = 2;\n", "int value = 3;\n"):
        with_sources.write("csrc/code.cpp", text)
        build_tree(with_sources.order(), with_sources.out)
        assert (with_sources.out / MODULE).read_text() == text
    assert compiles == ["int value = 2;\n", "int value = 3;\n"]


def test_without_a_compiler_the_tree_has_no_module_and_the_build_says_so(
    with_sources: Mini, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build_tree(with_sources.order(), with_sources.out)
    assert not (with_sources.out / MODULE).exists()
    said = capsys.readouterr().out
    assert said.count("native library: left out, as there is no C++ compiler") == 1


def test_sources_that_cannot_be_configured_are_left_out(
    with_sources: Mini, capsys: pytest.CaptureFixture
) -> None:
    with_sources.write("CMakeLists.txt", 'message(FATAL_ERROR "too old")\n')
    build_tree(with_sources.order(), with_sources.out)
    assert not (with_sources.out / MODULE).exists()
    assert "too old" in capsys.readouterr().out


def test_sources_that_do_not_compile_fail_the_build(with_sources: Mini) -> None:
    with_sources.write(
        "CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.25)\nproject(mini LANGUAGES CXX)\n"
        "add_library(_native MODULE csrc/code.cpp)\n",
    )
    with_sources.write("csrc/code.cpp", "no code\n")
    with pytest.raises(BuildFailure, match="does not compile"):
        build_tree(with_sources.order(), with_sources.out)
