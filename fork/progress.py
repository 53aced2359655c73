# SPDX-License-Identifier: Apache-2.0
"""Prints progress lines with timings."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print a step and its duration when it is done."""
    start = time.perf_counter()
    yield
    print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
