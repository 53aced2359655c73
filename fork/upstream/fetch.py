# SPDX-License-Identifier: Apache-2.0
"""Downloads an upstream wheel to the cache and verifies its hash."""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fork.errors import BuildFailure
from fork.paths import cache_root
from fork.upstream.pins import WheelPin

# Wheels for other machines and Python versions than this one must be downloadable.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_31", "manylinux_2_35", "manylinux2014")
_PYTHON = "3.12"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(pin: WheelPin, version: str, machine: str) -> Path:
    """The pinned wheel, downloaded unless the cache has it.

    Raises:
        BuildFailure: it cannot be downloaded or has another hash.
    """
    path = cache_root() / "wheels" / pin.sha256 / pin.file
    if not path.exists():
        _download(pin.project, version, machine, path.parent)
    if not path.exists():
        found = ", ".join(p.name for p in path.parent.glob("*.whl"))
        raise BuildFailure(
            f"the registry gave {found} for {pin.project} {version}, expected "
            f"{pin.file}: was the release rebuilt? See docs/operate/upgrading.md"
        )
    verify(
        path,
        pin.sha256,
        remedy=f"remove {path} and build again; if the hash "
        "differs again, do not use the file: the registry serves another wheel",
    )
    return path


def fetch_release(project: str, version: str, machine: str) -> Path:
    """A wheel of any release, without a pinned hash, for `check`.

    Raises:
        BuildFailure: it cannot be downloaded.
    """
    folder = cache_root() / "wheels" / f"{project}-{version}-{machine}"
    if not any(folder.glob("*.whl")):
        _download(project, version, machine, folder)
    return next(folder.glob("*.whl"))


def verify(path: Path, sha256: str, remedy: str) -> None:
    """Check a file's hash.

    Raises:
        BuildFailure: the hash differs; the message ends with `remedy`.
    """
    found = sha256_of(path)
    if found != sha256.lower():
        raise BuildFailure(
            f"{path.name} has another hash: expected sha256 {sha256.lower()}, found "
            f"{found}; {remedy}"
        )


def wheel_version(path: Path) -> str:
    """The version in a wheel's file name.

    Raises:
        BuildFailure: the name is not that of a wheel.
    """
    match = re.fullmatch(r"[^-]+-([^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl", path.name)
    if match is None:
        raise BuildFailure(f"{path}: not the name of a wheel (NAME-VERSION-TAGS.whl)")
    return match[1]


def _download(project: str, version: str, machine: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"  downloading {project} {version} for {machine}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = _pip_command(project, version, machine, temporary)
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise BuildFailure(
                f"could not download {project} {version} for {machine}: "
                f"{_last_line(done.stderr)}; check the network and pip's "
                "configuration, or pass a wheel with --wheel FILE"
            )
        folder.mkdir(exist_ok=True)
        for wheel in wheels:
            wheel.replace(folder / wheel.name)


def _pip_command(project: str, version: str, machine: str, folder: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", f"{project}=={version}"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", folder, "--quiet"]
    command += ["--disable-pip-version-check"]
    command += ["--implementation", "cp", "--python-version", _PYTHON]
    command += ["--abi", "abi3", "--abi", "cp312", "--abi", "none"]
    for platform in _PLATFORMS:
        command += ["--platform", f"{platform}_{machine}"]
    return command


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip said nothing"
