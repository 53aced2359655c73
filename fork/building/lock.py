# SPDX-License-Identifier: Apache-2.0
"""A lock that builds take in turn."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_one(made: Path) -> Iterator[None]:
    """Hold the lock of what builds make at a path, so that they run one at a time."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / f".{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
