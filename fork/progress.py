# SPDX-License-Identifier: Apache-2.0
"""Short progress lines with timings."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print a step and how long it took, once it is done."""
    start = time.perf_counter()
    yield
    print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
