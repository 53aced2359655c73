# SPDX-License-Identifier: Apache-2.0
"""The built tree as a setuptools distribution, for `setup.py`."""

import os
import shutil
from pathlib import Path
from typing import Any

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from fork.building.builder import Built, Order, build_tree
from fork.building.contents import Added, top_packages
from fork.building.metadata import license_files
from fork.errors import BuildFailure
from fork.paths import HERE
from fork.upstream.pins import default_device
from fork.upstream.release import copy_or_link


def setup_arguments() -> dict[str, Any]:  # setuptools' keywords are of every type
    """Build the tree and return the keyword arguments for `setuptools.setup`.

    Raises:
        SystemExit: the build failed; has the error messages.
    """
    try:
        device = default_device()
        tree = HERE.tree(device)
        built = build_tree(Order(device=device), tree)
    except BuildFailure as failure:
        raise SystemExit(f"fork: {failure}") from None
    metadata = built.metadata
    return {
        "version": metadata.version,
        "description": metadata.summary,
        "python_requires": metadata.requires_python,
        "install_requires": metadata.install_requires(),
        "extras_require": metadata.extras_require(),
        "entry_points": {
            group: [f"{name} = {target}" for name, target in points.items()]
            for group, points in metadata.entry_points.items()
        },
        "packages": top_packages(built.contents),
        # One source folder: an editable install becomes a plain path entry.
        "package_dir": {"": os.path.relpath(tree, HERE.root)},
        "distclass": BinaryDistribution,
        "cmdclass": _commands(built, device),
    }


class BinaryDistribution(Distribution):
    """A distribution with compiled libraries that were not built by setuptools."""

    def has_ext_modules(self) -> bool:
        """Whether it installs beside platform-specific packages."""
        return True


def _commands(built: Built, device: str) -> dict[str, type]:
    class CopyTree(build_py):
        """Copy the whole tree, including data and libraries, with links resolved."""

        def run(self) -> None:
            if not self.editable_mode:
                target = Path(self.build_lib)
                for name in top_packages(built.contents):
                    shutil.rmtree(target / name, ignore_errors=True)
                copy_contents(built, HERE.tree(device), target)

        def get_source_files(self) -> list[str]:
            return []

        def get_outputs(self, include_bytecode: bool = True) -> list[str]:
            return [str(Path(self.build_lib) / path) for path in installed_files(built)]

    class TaggedWheel(bdist_wheel):
        """A wheel with upstream's tag and with both licences.

        Stored uncompressed by default: deflating half a gigabyte of libraries takes
        longer than the rest of the build.
        """

        def initialize_options(self) -> None:
            super().initialize_options()
            self.compression = "stored"

        def get_tag(self) -> tuple[str, str, str]:
            python, abi, platform = built.release.tags.split("-")
            return python, abi, platform

        def write_wheelfile(self, wheelfile_base: str, *args: Any, **more: Any) -> None:
            super().write_wheelfile(wheelfile_base, *args, **more)
            for name, path in license_files(built.release, HERE).items():
                target = Path(wheelfile_base) / "licenses" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    return {"build_py": CopyTree, "bdist_wheel": TaggedWheel}


def installed_files(built: Built) -> list[str]:
    """The files of all packages, by their path; the metadata is setuptools' own."""
    packages = top_packages(built.contents)
    return [path for path in built.contents if path.partition("/")[0] in packages]


def copy_contents(built: Built, tree: Path, target: Path) -> None:
    """Copy the packages without links into the checkout; hard-link large files."""
    for path in installed_files(built):
        content = built.contents[path]
        source = content.path if isinstance(content, Added) else tree / path
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        copy_or_link(source, target / path)
