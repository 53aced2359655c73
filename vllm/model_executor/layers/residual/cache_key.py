# SPDX-License-Identifier: Apache-2.0
"""The part of the compile-cache key that covers hook points.

A compiled graph contains calls of the custom ops in this folder. A graph compiled by
another version of this code must not be reused, and the package version does not
change with every commit, so the key hashes the source files.
"""

import hashlib
from functools import cache
from pathlib import Path


@cache
def form() -> str:
    """SHA-256, in hex, of all source files in this folder."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
