# SPDX-License-Identifier: Apache-2.0
"""A request's hook functions, as sent to the engine core and the workers.

Built once, at admission. This module imports neither torch nor the rest of hooks,
because `vllm.sampling_params` imports it.
"""

import msgspec

GROUP = "vllm.hooks"
"""Entry points of this group are the functions that a request may name."""

ROWS = "rows"
"""Key of the hook that keeps the rows of the last layer; see `HookPlan.keeps_rows`."""


class HookSpec(msgspec.Struct, frozen=True, array_like=True):
    """One function, and where it runs."""

    key: str
    """Its name in the results: its number in the list that it came in."""
    layers: tuple[int, ...]
    point: str
    """The hook point of these layers: after capture, vectors and operations."""
    name: str = ""
    """Of the entry point; empty if `code` has the function."""
    params: str = "{}"
    """JSON object: keyword arguments of a named function."""
    code: bytes = b""
    """The function, by cloudpickle."""
    shared: bool = False
    """Whether it was registered for all requests."""


class HookPlan(msgspec.Struct, frozen=True, array_like=True):
    """All functions that run for one request."""

    key: str
    """Unique; names the request's results."""
    hooks: tuple[HookSpec, ...]
    pickles: bool
    """Whether results may hold objects that only pickle can carry."""
    keeps_rows: int | None = None
    """The last layer, if its rows after all hooks are part of the result."""
