# SPDX-License-Identifier: Apache-2.0
"""Remembers what specs of requests resolve to, so that equal ones are resolved once.

A list of prompts with the same sampling parameters is admitted one request at a time,
while the engine computes the first ones. What that costs delays the others.
"""

from collections.abc import Hashable, Set
from itertools import chain
from typing import Any

from vllm.v1.residual.capture_plan import TapGroup
from vllm.v1.residual.plain_data import ATOMS

MOST_KNOWN = 256
MOST_VALUES = 256
"""Specs with more values are resolved each time: they would be kept as keys."""


class KnownSpecs:
    """The groups of taps of recent specs. Thread-safe."""

    def __init__(self, pure: Set[str]) -> None:
        """Start with none.

        Args:
            pure: names of the consumers that accept equal specs of requests of equal
                lengths alike.

        """
        self._pure = pure
        self._groups: dict[Hashable, tuple[TapGroup, ...]] = {}

    def key(self, capture: Any, *rest: Hashable) -> Hashable | None:
        """The key of a spec; None if it must be resolved each time.

        Args:
            capture: a request's field `capture`, as the user wrote it. Only dicts,
                lists and atoms have a key, which are sent as they are.
            rest: what else the result depends on.

        """
        if type(capture) is not dict or not capture.keys() <= self._pure:
            return None
        values: list[Any] = list(rest)
        return tuple(values) if _flattened(capture, values) else None

    def find(self, key: Hashable | None) -> tuple[TapGroup, ...] | None:
        """What `put` has stored under a key."""
        return None if key is None else self._groups.get(key)

    def put(self, key: Hashable | None, groups: tuple[TapGroup, ...]) -> None:
        """Remember the groups of a spec that was accepted; None does nothing."""
        if key is None:
            return
        if len(self._groups) >= MOST_KNOWN:
            self._groups.clear()
        self._groups[key] = groups


def _flattened(raw: Any, values: list[Any]) -> bool:
    """Append nested dicts, lists and atoms; whether there was nothing else, nor many.

    Types are part of a key: True and 1.0 are equal to 1.
    """
    kind = type(raw)
    if len(values) > MOST_VALUES:
        return False
    if kind is dict or kind is list:
        values += (kind, len(raw))
        items = chain.from_iterable(raw.items()) if kind is dict else raw
        return all(_flattened(one, values) for one in items)
    if kind in ATOMS:
        values += (kind, raw)
        return True
    return False
