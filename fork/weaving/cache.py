# SPDX-License-Identifier: Apache-2.0
"""Caches woven files between builds, by the hash of everything that they depend on.

The hash includes the weaving code, so that a change of it invalidates the cache.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import libcst

from fork.paths import cache_root

_FORK = Path(__file__).parents[1]

_UNUSED_SECONDS = 14 * 24 * 3600


def keep(key: str, record: dict[str, Any]) -> None:
    """Store a record atomically; several processes may store the same one."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(path)


def recall(key: str) -> dict[str, Any] | None:
    """The record of a key; None if there is none or it is damaged."""
    path = _path(key)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        os.utime(path)
    except (FileNotFoundError, ValueError):
        return None
    return record


def forget_unused() -> None:
    """Remove records that no build has used for two weeks."""
    oldest = time.time() - _UNUSED_SECONDS
    for path in _path("").parent.glob("*.json"):
        with suppress(FileNotFoundError):  # a concurrent build has removed it
            if path.stat().st_mtime < oldest:
                path.unlink()


def _path(key: str) -> Path:
    return cache_root() / "woven" / f"{key}.json"


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 of several byte strings and their boundaries, in hex."""
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
    """Hash of the edit language, what edit files share, and the weaver."""
    shared = [_FORK / "request_fields.py", _FORK / "weaving" / "weaver.py"]
    files = [path.read_bytes() for path in shared]
    return digest_of([_digest_of_folder(_FORK / "language"), *files]).encode()


@cache
def weave_digest() -> bytes:
    """Hash of the decoder-layer weave and what it builds on."""
    return digest_of([_digest_of_folder(_FORK / "weave"), language_digest()]).encode()


@cache
def architectures_digest() -> bytes:
    """Hash of the code that finds the layers of architectures."""
    return _digest_of_folder(_FORK / "architectures")
