# SPDX-License-Identifier: Apache-2.0
"""Woven files kept between builds, by the hash of all they depend on."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fork.paths import cache_root

_UNUSED_SECONDS = 14 * 24 * 3600


def keep(key: str, record: dict[str, Any]) -> None:
    """Store a record; several processes may store the same one."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(path)


def recall(key: str) -> dict[str, Any] | None:
    """The record of a key, None if there is none or it is damaged."""
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
        with suppress(FileNotFoundError):  # another build was faster
            if path.stat().st_mtime < oldest:
                path.unlink()


def _path(key: str) -> Path:
    return cache_root() / "woven" / f"{key}.json"
