# SPDX-License-Identifier: Apache-2.0
"""Runs a call for many prompts, some at a time."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


def run_many(
    call: Callable[[Any], T], prompts: Sequence[Any], concurrency: int, progress: bool
) -> list[T]:
    """The results of a call for each prompt, in order.

    Raises:
        Exception: that of the first call that failed; those that wait are not made.

    """
    began = monotonic()
    shown = progress and sys.stderr.isatty()

    def named(number: int, prompt: Any) -> T:
        try:
            return call(prompt)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.10 has no notes.
                error.add_note(f"prompts[{number}] is {str(prompt)[:80]!r}")
            raise

    with ThreadPoolExecutor(max(concurrency, 1), "clearbox-many") as pool:
        # In this context, which says what is aborted if an asynchronous call ends.
        futures = [
            pool.submit(copy_context().run, named, *item) for item in enumerate(prompts)
        ]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                if shown:
                    _show(done, len(futures), monotonic() - began)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            if shown:
                print(file=sys.stderr)
    return [future.result() for future in futures]


def _show(done: int, total: int, seconds: float) -> None:
    bar = "#" * (30 * done // total)
    left = seconds / done * (total - done)
    state = f"{done}/{total}, {done / max(seconds, 1e-9):.1f} per s, {left:.0f} s left"
    print(f"\r[{bar:30}] {state}  ", end="", file=sys.stderr, flush=True)
