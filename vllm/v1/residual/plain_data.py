# SPDX-License-Identifier: Apache-2.0
"""Data and names that can be sent to another process: plain, of bounded size."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from vllm.v1.residual.bounds import shown

MAX_DEPTH = 64
"""Maximum nesting of lists and dicts."""
MAX_CONTAINERS = 1 << 17
"""Maximum number of lists and dicts; shared ones count each time."""
MAX_TEXT_VALUES = 1 << 18
"""Maximum number of values in JSON that a client sends as text."""
MAX_NAME = 128
"""Characters of the name of a module or a readout."""

ATOMS = frozenset({str, int, float, bool, type(None)})
"""Types that `plain` returns unchanged: most values of a request parsed from JSON."""


def plain(raw: Any) -> Any:
    """`raw` as JSON-like data: dataclasses become dicts, sequences and arrays lists."""
    if type(raw) in ATOMS:
        return raw
    if type(raw) not in (dict, list):
        raw = _converted(raw)
    if isinstance(raw, Mapping):
        return {key: plain(value) for key, value in raw.items()}
    if isinstance(raw, (list, tuple, range)):
        return [plain(value) for value in raw]
    return raw


def is_name(name: Any, most: int = MAX_NAME) -> bool:
    """Whether a value may be a name: printable text without blanks around it."""
    good = isinstance(name, str) and name.isprintable() and name.strip() == name
    return good and 0 < len(name) <= most


def _converted(raw: Any) -> Any:
    """Dataclasses as dicts, arrays and tensors as lists or numbers."""
    if is_dataclass(raw) and not isinstance(raw, type):
        return asdict(raw)
    to_list = getattr(raw, "tolist", None)
    return raw if to_list is None else to_list()


def fault_of(data: Any) -> str | None:
    """Why data cannot be serialized: too deep, cyclic, or an integer too large.

    Args:
        data: dicts, lists and atoms. Other objects are not checked here.

    Returns:
        The reason as the rest of a sentence about the data; None if there is none.

    """
    waiting: list[tuple[Any, int]] = [([data], 0)]
    containers = -1
    while waiting:
        here, depth = waiting.pop()
        containers += 1
        if containers > MAX_CONTAINERS:
            return f"has more than {MAX_CONTAINERS} lists and objects"
        items = [*here.keys(), *here.values()] if isinstance(here, dict) else here
        if set(map(type, items)) <= {str, float, bool, type(None)}:
            continue
        if any(isinstance(n, int) and not -(1 << 63) <= n < 1 << 64 for n in items):
            return "contains an integer of more than 64 bits; convert it to text"
        inner = [one for one in items if isinstance(one, (dict, list, tuple))]
        if inner and depth == MAX_DEPTH:
            return (
                f"is more than {MAX_DEPTH} lists and objects deep, or contains itself"
            )
        # Depth first, so that a cycle reaches MAX_DEPTH soon.
        waiting += [(one, depth + 1) for one in inner]
    return None


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON parser's pairs, to be passed as `object_pairs_hook`.

    Parsers keep the last of equal keys, so the others would be ignored.

    Raises:
        ValueError: a key is given twice.

    """
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key, count in times.items() if count > 1)
        raise ValueError(
            f"it has the key {shown(twice)} twice in one object; keep one of them"
        )
    return found


def parse_text(text: str) -> Any:
    """Parse JSON that a client sends within a text.

    Raises:
        ValueError: it is not JSON, or larger or deeper than any request needs.

    """
    if sum(text.count(sign) for sign in "[{,") > MAX_TEXT_VALUES:
        raise ValueError(
            f"it has more than {MAX_TEXT_VALUES} values; send arrays as base64"
        )
    try:
        data = json.loads(text, object_pairs_hook=unique_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if fault := fault_of(data):
        raise ValueError(f"it {fault}")
    return data
