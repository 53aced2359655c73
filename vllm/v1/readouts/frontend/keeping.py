# SPDX-License-Identifier: Apache-2.0
"""`keep_when`: which rows of a capture are kept, by a readout of the same request."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.frontend.rules import parse_rule
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.readout_plan import KeepWhen, Readout

MAX_WINDOW = 1 << 20
"""Largest `before` and `after`, in tokens."""
SCOPES = ("request", "token")


def parse_keep_when(
    instance: str,
    raw: Any,
    readouts: Mapping[str, Readout],
    modules: Mapping[str, ModuleInfo],
) -> KeepWhen:
    """Parse the `keep_when` of a consumer's spec.

    Args:
        instance: the consumer.
        raw: `{"readout", "above" or "below", "index"?, "scope"?, "before"?, "after"?}`.
        readouts: the request's parsed readouts, by name.
        modules: the registered modules, by name.

    Raises:
        ReadoutValidationError: it is invalid.

    """
    where = f"capture.{instance}.keep_when"
    own = ("scope", "before", "after")
    rule = parse_rule(raw, readouts, modules, where, own)
    scope = raw.get("scope", "request")
    if scope not in SCOPES:
        raise fail(f"{where}.scope must be one of {list(SCOPES)}", where, scope)
    window = [raw.get(name, 0) for name in ("before", "after")]
    for name, size in zip(("before", "after"), window):
        if not is_integer(size, 0, MAX_WINDOW + 1):
            message = f"{where}.{name} must be a number of tokens, 0 to {MAX_WINDOW}"
            raise fail(message, f"{where}.{name}", size)
    if scope == "request" and any(window):
        raise fail(
            f'{where}: before and after are windows of the scope "token"; with '
            '"request" all rows are kept. Leave them out',
            where,
            raw,
        )
    return KeepWhen(instance, rule, scope, *window)
