# SPDX-License-Identifier: Apache-2.0
"""Parsing and validation of what users write: hooks, layers and positions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.plan import OPEN_END, Ranges, ranges_of
from vllm.v1.capture.types import HOOK_NAMES, CaptureContext, CaptureSpec
from vllm.v1.residual.bounds import count_values, listed, shown

MLP_REMEDY = ". Start the server with --mlp-hook-points to add mlp_in and mlp_out"

ATOMS = frozenset({str, int, float, bool, type(None)})
"""Types that `plain` returns unchanged: most values of a request parsed from JSON."""

POSITION_NAMES = ("last_prompt", "all_prompt", "all_generated", "all")


def fail(message: str, parameter: str, value: Any) -> CaptureValidationError:
    """The error for `parameter`, with long values shortened; the caller raises it."""
    return CaptureValidationError(message, parameter=parameter, value=shown(value))


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


def _converted(raw: Any) -> Any:
    """Dataclasses as dicts, arrays and tensors as lists or numbers."""
    if is_dataclass(raw) and not isinstance(raw, type):
        return asdict(raw)
    if isinstance(raw, (np.ndarray, np.generic, torch.Tensor)):
        return raw.tolist()
    return raw


MAX_VALUES = 1 << 16
"""Maximum number of values in a request's `capture` field.

A range of layers counts as its two ends.
"""


def check_size(raw: Any, where: str) -> None:
    """Bound the number of values in `raw`, before code iterates over them.

    Raises:
        CaptureValidationError: there are more than `MAX_VALUES`.

    """
    if count_values(raw, MAX_VALUES) > MAX_VALUES:
        raise fail(
            f"{where} may hold at most {MAX_VALUES} values; use the names of positions "
            'and "all" or ranges of layers',
            where,
            raw,
        )


def check_request_size(params: Any) -> None:
    """`check_size` on the `capture` of sampling parameters; others pass."""
    capture = getattr(params, "capture", None)
    if capture is not None:
        check_size(capture, "capture")


def check_text(raw: Any, where: str) -> None:
    """Refuse strings with lone surrogates, which UTF-8 cannot encode.

    Args:
        raw: plain data.
        where: the parameter's name in the message.

    Raises:
        CaptureValidationError: a string holds one.

    """
    if isinstance(raw, str) and not raw.isascii():
        try:
            raw.encode()
        except UnicodeEncodeError as error:
            raise fail(
                f"{where} holds text with a lone surrogate, which is no Unicode; "
                "leave it out",
                where,
                raw,
            ) from error
    elif isinstance(raw, dict):
        for key, value in raw.items():
            check_text(key, where)
            check_text(value, where)
    elif isinstance(raw, list):
        for value in raw:
            check_text(value, where)


def parse_spec(
    raw: Any, ctx: CaptureContext, where: str, extra_keys: Iterable[str] = ()
) -> CaptureSpec:
    """Parse `{"hooks": {hook: layers}, "positions": selector}`.

    Args:
        raw: what the user wrote; `positions` defaults to `"last_prompt"`.
        ctx: facts about the request and the model.
        where: the parameter's name in messages, such as `capture.filesystem`.
        extra_keys: allowed keys besides `hooks` and `positions`; not read here.

    Raises:
        CaptureValidationError: it is invalid; names the parameter, value and remedy.

    """
    raw = plain(raw)
    allowed = {"hooks", "positions", *extra_keys}
    if not isinstance(raw, dict):
        raise fail(
            f"{where} must be an object with the keys {sorted(allowed)}", where, raw
        )
    if unknown := sorted(str(key) for key in raw if key not in allowed):
        raise fail(
            f"{where} has no key {shown(unknown[0])}; its keys are {sorted(allowed)}",
            f"{where}.{unknown[0]}",
            raw[unknown[0]] if unknown[0] in raw else unknown[0],
        )
    hooks = parse_hooks(raw.get("hooks"), ctx, f"{where}.hooks")
    positions = raw.get("positions", "last_prompt")
    resolve_positions(positions, ctx, f"{where}.positions")
    return CaptureSpec(hooks, positions)


def parse_hooks(raw: Any, ctx: CaptureContext, where: str) -> dict[Any, list[int]]:
    """Parse `{hook: layer selector}`; each selector becomes a sorted list of layers.

    Raises:
        CaptureValidationError: a hook or a layer is unknown to the model.

    """
    if not isinstance(raw, dict) or not raw:
        raise fail(
            f"{where} must map at least one hook point to layers, for example "
            '{"post_block": [0]} or {"post_block": "all"}',
            where,
            raw,
        )
    hooks: dict[Any, list[int]] = {}
    for hook, selector in raw.items():
        if hook not in HOOK_NAMES:
            raise fail(
                f"{where}: {shown(hook)} is not a hook point; the hook points are "
                f"{list(HOOK_NAMES)}",
                where,
                hook,
            )
        having = [
            layer for layer, points in sorted(ctx.hook_points.items()) if hook in points
        ]
        if not having:
            raise fail(
                f"{where}: this model has no hook point {hook!r}; it has "
                f"{sorted({p for points in ctx.hook_points.values() for p in points})}"
                f"{MLP_REMEDY if hook.startswith('mlp') else ''}",
                where,
                hook,
            )
        hooks[hook] = _parse_layers(selector, having, ctx, f"{where}.{hook}")
    return hooks


def _parse_layers(
    raw: Any, having: Sequence[int], ctx: CaptureContext, where: str
) -> list[int]:
    if raw == "all":
        return list(having)
    if isinstance(raw, list):
        layers = [_layer(value, ctx, where) for value in raw]
    elif isinstance(raw, dict) and raw and not raw.keys() - {"layers", "ranges"}:
        layers = [
            _layer(value, ctx, f"{where}.layers")
            for value in _a_list(raw.get("layers", []), f"{where}.layers")
        ]
        for pair in _a_list(raw.get("ranges", []), f"{where}.ranges"):
            if not isinstance(pair, list) or len(pair) != 2:
                raise fail(
                    f"{where}.ranges must hold pairs [first, last], last included",
                    f"{where}.ranges",
                    pair,
                )
            first, last = (_layer(value, ctx, f"{where}.ranges") for value in pair)
            if first > last:
                raise fail(
                    f"{where}.ranges: a pair [first, last] needs first <= last",
                    f"{where}.ranges",
                    pair,
                )
            layers += range(first, last + 1)
    else:
        raise fail(
            f'{where} must be a list of layers, "all", or '
            '{"layers": [...], "ranges": [[first, last], ...]}',
            where,
            raw,
        )
    if not layers:
        raise fail(f"{where} selects no layer; name one or leave it out", where, raw)
    known = set(having)
    for layer in layers:
        if layer not in known:
            raise fail(
                f"{where}: layer {layer} of this model does not have this hook "
                f"point; these have it: {listed(having)}",
                where,
                layer,
            )
    return sorted(set(layers))


def _a_list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise fail(f"{where} must be a list", where, raw)
    return raw


def _layer(raw: Any, ctx: CaptureContext, where: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise fail(f"{where}: a layer is a whole number", where, raw)
    if not 0 <= raw < ctx.num_hidden_layers:
        raise fail(
            f"{where}: layer {raw} is outside of this model's layers "
            f"0 to {ctx.num_hidden_layers - 1}",
            where,
            raw,
        )
    return raw


def resolve_positions(raw: Any, ctx: CaptureContext, where: str) -> Ranges:
    """Resolve a position selector to ranges of token positions.

    A request with P prompt tokens that generates N tokens has rows at positions 0 to
    P+N-2; ranges of generated positions end at `OPEN_END`.

    Raises:
        CaptureValidationError: the selector is invalid, or lists a position that the
            request cannot reach with its `max_tokens`.

    """
    prompt = ctx.num_prompt_tokens
    match raw:
        case "last_prompt":
            return ((prompt - 1, prompt),)
        case "all_prompt":
            return ((0, prompt),)
        case "all_generated":
            return ((prompt, OPEN_END),)
        case "all":
            return ((0, OPEN_END),)
    if not isinstance(raw, list) or not raw:
        raise fail(
            f"{where} must be one of {list(POSITION_NAMES)} or a list of token "
            "positions that is not empty",
            where,
            raw,
        )
    for value in raw:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(f"{where}: a position is a whole number", where, value)
        if value < 0:
            raise fail(
                f"{where}: positions count from 0; give "
                f"{max(prompt + value, 0)} for the position {value} from the "
                "prompt's end",
                where,
                value,
            )
        if ctx.max_tokens is not None and value > prompt + ctx.max_tokens - 2:
            raise fail(
                f"{where}: with {prompt} prompt tokens and max_tokens="
                f"{ctx.max_tokens} the last row is at position "
                f"{prompt + ctx.max_tokens - 2} (the last token is never fed "
                "back); leave the position out or raise max_tokens",
                where,
                value,
            )
    return ranges_of(raw)


def within_reach(spec: CaptureSpec, ctx: CaptureContext) -> CaptureSpec | None:
    """Restrict a global spec to the positions that a request can reach.

    The request did not choose these positions, so ones past its end are not an error.

    Returns:
        The restricted spec, None if no position is left.

    """
    listed = plain(spec.positions)
    if isinstance(listed, str) or ctx.max_tokens is None:
        return spec
    end = ctx.num_prompt_tokens + ctx.max_tokens - 1
    reached = [position for position in listed if position < end]
    return CaptureSpec(spec.hooks, reached) if reached else None
