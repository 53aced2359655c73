# SPDX-License-Identifier: Apache-2.0
"""Compiles the native library in `csrc/`, once per state of its sources.

The library is optional: without a compiler Python code copies rows, and steering cannot
be enabled on a CPU; the build says so.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fork.building.contents import Contents, Copied
from fork.building.lock import only_one
from fork.errors import BuildFailure
from fork.paths import Checkout, cache_root
from fork.progress import step
from fork.weaving.cache import digest_of

FOLDER = "vllm/v1/residual/native"
"""Folder of the module in the tree."""

_LOG_LINES = 30


def native_files(checkout: Checkout, jobs: int) -> Contents:
    """The compiled module by its path in the tree; empty if it cannot be built here.

    Raises:
        BuildFailure: compilation failed.
    """
    if not (checkout.root / "CMakeLists.txt").exists():
        return {}
    missing = _missing_tools()
    if missing:
        print(
            f"  native library: left out, as there is no {missing}; a CPU cannot steer"
        )
        return {}
    digest = _digest(checkout)
    kept = cache_root() / "native" / digest
    if not kept.exists():
        with step("native library"), only_one(checkout.root / "build" / "native"):
            module = _compile(checkout, jobs)
            if module is None:
                return {}
            _keep(module, kept)
    (module,) = kept.iterdir()
    return {f"{FOLDER}/{module.name}": Copied(module, f"compiled {digest}")}


def _tool(name: str) -> str | None:
    # pip installs scripts next to Python, in a folder that may not be on the path.
    beside = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    return shutil.which(name, path=beside)


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    names = [chosen.split()[0]] if chosen else ["c++", "g++", "clang++"]
    return next(filter(None, map(_tool, names)), None)


def _missing_tools() -> str | None:
    if _compiler() is None:
        return "C++ compiler"
    for tool in ("cmake", "ninja"):
        if _tool(tool) is None:
            return tool
    return None if _nanobind() else "nanobind"


def _nanobind() -> str | None:
    try:
        return version("nanobind")
    except PackageNotFoundError:
        return None


def _digest(checkout: Checkout) -> str:
    """Hash of everything that the compiled module depends on."""
    root = checkout.root
    sources = [root / "CMakeLists.txt"]
    sources += sorted(path for path in (root / "csrc").rglob("*") if path.is_file())
    tools = (sysconfig.get_config_var("EXT_SUFFIX"), _nanobind(), _compiler())
    parts = [repr((platform.machine(), *tools)).encode()]
    for path in sources:
        parts += [path.relative_to(root).as_posix().encode(), path.read_bytes()]
    return digest_of(parts)


def _compile(checkout: Checkout, jobs: int) -> Path | None:
    """The module in its build folder; None if it cannot be configured."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    assert cmake is not None and ninja is not None, "asked for before"
    folder = checkout.root / "build" / f"native-{sysconfig.get_config_var('SOABI')}"
    # The CMake cache has nanobind's path, which differs in an isolated build.
    (folder / "CMakeCache.txt").unlink(missing_ok=True)
    configure = [cmake, "-S", str(checkout.root), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dnanobind_DIR={_cmake_folder()}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCLEARBOX_WERROR=OFF"]
    configured = _run(configure)
    if configured.returncode:
        print(f"  native library: left out; a CPU cannot steer. {_end(configured)}")
        return None
    compiled = _run([cmake, "--build", str(folder), "--parallel", str(jobs)])
    if compiled.returncode:
        raise BuildFailure(
            f"csrc/ does not compile with {_compiler()}: set CXX to another compiler, "
            f"or to `none` for a build without:\n{_end(compiled)}"
        )
    # The folder may also have a module for another nanobind or Python version.
    return max(folder.glob("_native*.so"), key=lambda path: path.stat().st_mtime_ns)


def _cmake_folder() -> str:
    import nanobind

    folder: str = nanobind.cmake_dir()
    return folder


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _end(run: "subprocess.CompletedProcess[str]") -> str:
    return "\n".join(run.stdout.splitlines()[-_LOG_LINES:])


def _keep(module: Path, kept: Path) -> None:
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    shutil.copy2(module, partial)
    try:
        partial.rename(kept)
    except OSError:  # a concurrent build has stored it already
        shutil.rmtree(partial)
