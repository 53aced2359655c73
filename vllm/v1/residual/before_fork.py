# SPDX-License-Identifier: Apache-2.0
"""Work with tensors in a process that is forked later, as the engine's often is.

OpenMP threads belong to the thread that first uses them, and do not exist in a forked
process. There the same thread would wait for them forever in its first large operation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_own_thread(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a function so that each call runs on a new thread and is waited for."""

    @wraps(function)
    def run(*arguments: Given.args, **named: Given.kwargs) -> Result:
        with ThreadPoolExecutor(1, "before-fork") as threads:
            return threads.submit(function, *arguments, **named).result()

    return run
