# SPDX-License-Identifier: Apache-2.0
"""Hashes of the code that weaves, so that a change of it weaves anew."""

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import libcst

_FORK = Path(__file__).parents[1]


def digest_of(parts: Iterable[bytes]) -> str:
    """Hash of several byte strings, their boundaries included."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _digest_of_folder(folder: Path) -> bytes:
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in (".py", ".toml")
    )
    parts = [_tools()]
    for path in files:
        parts += [path.relative_to(folder).as_posix().encode(), path.read_bytes()]
    return digest_of(parts).encode()


def _tools() -> bytes:
    versions = (sys.version_info[:2], getattr(libcst, "LIBCST_VERSION", ""))
    return repr(versions).encode()


@cache
def language_digest() -> bytes:
    """Hash of the edit language and the weaver."""
    weaver = (_FORK / "weaving" / "weaver.py").read_bytes()
    return digest_of([_digest_of_folder(_FORK / "language"), weaver]).encode()


@cache
def weave_digest() -> bytes:
    """Hash of the decoder-layer weave and what it builds on."""
    return digest_of([_digest_of_folder(_FORK / "weave"), language_digest()]).encode()


@cache
def architectures_digest() -> bytes:
    """Hash of what follows architectures to their layers."""
    return _digest_of_folder(_FORK / "architectures")
