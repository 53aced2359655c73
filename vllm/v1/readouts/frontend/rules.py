# SPDX-License-Identifier: Apache-2.0
"""Parses comparisons of readouts with bounds, of `stop_when` and of `keep_when`."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.frontend.spec import values_per_token
from vllm.v1.residual.bounds import counted
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import finite_number, is_integer
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.readout_plan import KeepWhen, Readout, StopWhen
from vllm.v1.residual.row_selection import CaptureContext

MAX_RULES = 64
MAX_WINDOW = 1 << 20
"""Largest `before` and `after`, in tokens."""
SCOPES = ("request", "token")


def parse_stops(
    raw: Any,
    readouts: list[Readout],
    ctx: CaptureContext,
    modules: Mapping[str, ModuleInfo],
) -> tuple[StopWhen, ...]:
    """Parse `stop_when` and check it against the readouts that it refers to.

    Args:
        raw: the value of `listed_rules`.
        readouts: the request's parsed readouts.
        ctx: the request's prompt length and the model's dimensions.
        modules: the registered modules, by name.

    Raises:
        ReadoutValidationError: a rule is invalid.

    """
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_RULES:
        raise fail(
            'stop_when must be a list such as [{"readout": "my_probe", "above": 0.9}]',
            "stop_when",
            raw,
        )
    by_name = {one.name: one for one in readouts}
    rules = tuple([parse_rule(one, by_name, modules, "stop_when") for one in raw])
    for readout in [by_name[rule.readout] for rule in rules]:
        if all(stop <= ctx.num_prompt_tokens for _, stop in readout.ranges):
            raise fail(
                f"stop_when: {readout.name!r} reads no generated token, so it would "
                'never end the request; give it positions "all_generated"',
                "stop_when.readout",
                readout.name,
            )
    return rules


def listed_rules(raw: Any) -> Any:
    """The conditions as plain data; a single one becomes a list."""
    stops = plain(raw)
    return [stops] if isinstance(stops, dict) else stops


def parse_rule(
    raw: Any,
    readouts: Mapping[str, Readout],
    modules: Mapping[str, ModuleInfo],
    where: str,
    more: Sequence[str] = (),
) -> StopWhen:
    """Parse a comparison of a readout's values with bounds.

    Args:
        raw: `{"readout", "above" or "below", "index"?}`.
        readouts: the request's parsed readouts, by name.
        modules: the registered modules, by name.
        where: the parameter's name in messages.
        more: further keys, which the caller reads.

    Raises:
        ReadoutValidationError: it is invalid.

    """
    known = {"readout", "index", "above", "below", *more}
    if not isinstance(raw, dict) or raw.keys() - known:
        raise fail(f"{where}: the keys of an entry are {sorted(known)}", where, raw)
    readout = readouts.get(str(raw.get("readout")))
    if readout is None:
        said = 'an entry needs a "readout", a name; the request'
        if "readout" in raw:
            said = f"the request has no readout {raw['readout']!r}; it"
        raise fail(
            f"{where}: {said} has {sorted(readouts)}. Add it under readouts",
            f"{where}.readout",
            raw.get("readout"),
        )
    bounds = [_bound(raw, key, where) for key in ("above", "below")]
    if bounds == [None, None]:
        raise fail(f"{where}: each entry must have above, below or both", where, raw)
    index = raw["index"] if "index" in raw else _only_index(readout, where)
    if not is_integer(index, 0):
        raise fail(f"{where}.index must count from 0", f"{where}.index", index)
    _check_index(readout, index, modules, where)
    return StopWhen(readout.name, bounds[0], bounds[1], int(index))


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


def _only_index(readout: Readout, where: str) -> int:
    """The index of a rule that has none: the only feature, or the first value.

    Raises:
        ReadoutValidationError: the readout is of several features of an SAE.

    """
    if readout.kind != "sae":
        return 0
    if len(readout.features) != 1:
        raise fail(
            f"{where}.index: name the feature of {readout.name!r} that is compared",
            f"{where}.index",
            None,
        )
    return readout.features[0]


def _bound(raw: Mapping[str, Any], key: str, where: str) -> float | None:
    value = raw.get(key)
    return None if value is None else finite_number(value, f"{where}.{key}", fail)


def _check_index(
    readout: Readout, index: int, modules: Mapping[str, ModuleInfo], where: str
) -> None:
    """Reject an index that is out of range, where the number of values is known."""
    no_values = readout.kind in ("rows", "attention", "attribution")
    if no_values or (readout.kind == "lens" and not readout.tokens):
        raise fail(
            f"{where}: {readout.name!r} of kind {readout.kind!r} has no values to "
            "compare; use a probe, an sae, a norm, or a lens with tokens",
            f"{where}.readout",
            readout.name,
        )
    if readout.features and index not in readout.features:
        raise fail(
            f"{where}.index: {readout.name!r} reads the features "
            f"{list(readout.features)}; name one of them",
            f"{where}.index",
            index,
        )
    most = values_per_token(readout, modules)
    if most is not None and index >= most:
        raise fail(
            f"{where}.index: {readout.name!r} has "
            f"{counted(most, 'value')}, 0 to {most - 1}",
            f"{where}.index",
            index,
        )
    if readout.kind == "sae" and not readout.features:
        active = modules[readout.module].active if readout.module in modules else None
        if active is None or active > readout.top_k:
            raise fail(
                f"{where}.index: the feature {index} of {readout.name!r} may be "
                f"active and not among its {readout.top_k} largest; give the readout "
                f'"features": [{index}] instead of top_k',
                f"{where}.index",
                index,
            )
