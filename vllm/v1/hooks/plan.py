# SPDX-License-Identifier: Apache-2.0
"""A request's hook functions, as sent to the engine core and the workers.

Built once, at admission. This module imports neither torch nor the rest of hooks,
because `vllm.sampling_params` imports it.
"""

import msgspec

GROUP = "vllm.hooks"
"""Entry points of this group are the functions that a request may name."""


class HookSpec(msgspec.Struct, frozen=True, array_like=True):
    """One function, and the places where it runs."""

    key: str
    """The hook's key in the results: its index in the request's list, as text."""
    layers: tuple[int, ...]
    point: str
    """The hook point of these layers. The function runs after capture, vectors and
    operations."""
    name: str = ""
    """Name of the entry point; empty if `code` has the function."""
    params: str = "{}"
    """JSON object: keyword arguments of a named function."""
    code: bytes = b""
    """The function, serialized by cloudpickle."""
    shared: bool = False
    """Whether the hook was registered for all requests."""


class HookPlan(msgspec.Struct, frozen=True, array_like=True):
    """All functions that run for one request."""

    key: str
    """Unique key of the request's results."""
    hooks: tuple[HookSpec, ...]
    pickles: bool
    """Whether results may contain objects that only pickle can serialize."""
