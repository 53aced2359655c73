# SPDX-License-Identifier: Apache-2.0
"""Objects of requests, whose keys are known."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.steering.errors import fail


def object_of(
    raw: Any, at: str, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """An object as the user wrote it.

    Args:
        raw: the value.
        at: the parameter's name in messages.
        required: the keys that it must have.
        optional: the other keys that it may have.

    Raises:
        SteeringValidationError: it is none, or has other keys.

    """
    given = raw.keys() if isinstance(raw, Mapping) else ()
    unknown = sorted(str(key) for key in given if key not in (*required, *optional))
    missing = [key for key in required if key not in given]
    if not isinstance(raw, Mapping) or unknown or missing:
        raise fail(
            f"{at} must be an object with the keys {list(required)}"
            + (f", and optionally {list(optional)}" if optional else "")
            + f"; unknown: {unknown}, missing: {missing}",
            at,
            sorted(map(str, raw)) if isinstance(raw, Mapping) else raw,
        )
    return dict(raw)
