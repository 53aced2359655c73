# SPDX-License-Identifier: Apache-2.0
"""Which form compiled graphs have at hook points.

A compiled graph holds calls of our ops, with their arguments and at their places. One
that was compiled by another version of this code must not be taken from the cache, and
the version's number does not change with each commit.
"""

import hashlib
from functools import cache
from pathlib import Path


@cache
def form() -> str:
    """Changes with the code that puts ops into the graph, and with the ops'."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
