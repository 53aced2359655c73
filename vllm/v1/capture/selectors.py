# SPDX-License-Identifier: Apache-2.0
"""Parsing and validation of what users write: hooks, layers and positions."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.addresses import hook_name, parse_address
from vllm.v1.residual.bounds import count_values, counted, shown
from vllm.v1.residual.plain_data import fault_of
from vllm.v1.residual.selectors import POSITION_NAMES as POSITION_NAMES
from vllm.v1.residual.selectors import first_outside, parse_layers, parse_positions
from vllm.v1.residual.spans import LAST_ROW, OPEN_END, Spans, merged
from vllm.v1.residual.tap import HOOK_NAMES

MLP_REMEDY = ". Start the server with --mlp-hook-points to add mlp_in and mlp_out"

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


def check_range(raw: Any, where: str) -> None:
    """Refuse what cannot be sent to the engine's process, such as huge integers.

    Raises:
        CaptureValidationError: `raw` is too deep, or has an integer of over 64 bits.

    """
    if (fault := fault_of(raw)) is not None:
        raise fail(f"{where} {fault}", where, raw)


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
                f"{where} contains text with a lone surrogate, which is not Unicode; "
                "remove it",
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

    Of a consumer that takes results of readouts, `readouts` is one of the extra keys;
    then a spec may have it without `hooks`.

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
        why = "; this consumer takes no readouts" if unknown[0] == "readouts" else ""
        raise fail(
            f"{where} has no key {shown(unknown[0])}{why}; its keys are "
            f"{sorted(allowed)}",
            f"{where}.{unknown[0]}",
            raw[unknown[0]] if unknown[0] in raw else unknown[0],
        )
    if "hooks" not in raw and raw.get("readouts") is not None:
        if "positions" in raw:
            raise fail(
                f"{where}.positions: they are those of rows, and there are no hooks; "
                "give the positions in the readout",
                f"{where}.positions",
                raw["positions"],
            )
        return CaptureSpec({}, "last_prompt")
    hooks = parse_hooks(raw.get("hooks"), ctx, f"{where}.hooks")
    positions = raw.get("positions", "last_prompt")
    resolve_positions(positions, ctx, f"{where}.positions")
    return CaptureSpec(hooks, positions)


def parse_hooks(raw: Any, ctx: CaptureContext, where: str) -> dict[Any, list[int]]:
    """`{hook: layer selector}` with every selector as a sorted list of layers.

    A key may be another system's name of a hook point. Addresses, which name a layer
    too, stand in a list, or are keys whose value is None.
    """
    if isinstance(raw, list):
        raw = {name if isinstance(name, str) else shown(name): None for name in raw}
    if not isinstance(raw, dict) or not raw:
        raise fail(
            f"{where} must map at least one hook point to layers, for example "
            '{"post_block": [0]} or {"post_block": "all"}, or be a list of addresses '
            'such as ["post_block.0"]',
            where,
            raw,
        )
    hooks: dict[Any, list[int]] = {}
    for name, selector in raw.items():
        hook, selector = _hook(name, selector, where)
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
        at = f"{where}.{name}"
        layers = parse_layers(selector, having, ctx.num_hidden_layers, at, fail)
        hooks[hook] = sorted({*hooks.get(hook, []), *layers})
    return hooks


def _hook(name: Any, selector: Any, where: str) -> tuple[str, Any]:
    """Our name of a hook point, and its layers; an address says both."""
    if isinstance(name, str) and (hook := hook_name(name)) is not None:
        return hook, selector
    if isinstance(name, str) and (tap := parse_address(name)) is not None:
        if selector is not None:
            raise fail(
                f"{where}.{name}: an address includes its layer; map it to None, or "
                "give a list of addresses",
                f"{where}.{name}",
                selector,
            )
        return tap[1], [tap[0]]
    raise fail(
        f"{where}: {shown(name)} is not a hook point; the hook points are "
        f"{list(HOOK_NAMES)}, and addresses such as post_block.3",
        where,
        name,
    )


def resolve_positions(raw: Any, ctx: CaptureContext, where: str) -> Spans:
    """The ranges of token positions that a selector stands for.

    With P prompt tokens a request has rows 0 to P+N-2, N being the number of
    tokens it generates; ranges of generated positions are open at the end.
    """
    prompt = ctx.num_prompt_tokens
    found = parse_positions(raw, where, fail)
    match found:
        case "last_prompt":
            return ((prompt - 1, prompt),)
        case "all_prompt":
            return ((0, prompt),)
        case "all_generated":
            return ((prompt, OPEN_END),)
        case "last_generated":
            return ((prompt, LAST_ROW),)
        case "all":
            return ((0, OPEN_END),)
    end = OPEN_END if ctx.max_tokens is None else prompt + ctx.max_tokens - 1
    outside = first_outside(found, prompt, end)
    if outside is not None and outside < 0:
        raise fail(
            f"{where}: position {outside} from the prompt's end lies before its "
            f"start; the prompt has {counted(prompt, 'token')}",
            where,
            outside,
        )
    if outside is not None:
        raise fail(
            f"{where}: with {counted(prompt, 'prompt token')} and "
            f"max_tokens={ctx.max_tokens} the last row is at position {end - 1} "
            "(the last token is never fed back); leave the position out or raise "
            "max_tokens",
            where,
            outside,
        )
    return merged(
        (max(first + shift, 0), stop + shift)
        for first, stop in found
        for shift in (prompt if first < 0 else 0,)
    )


def within_reach(spec: CaptureSpec, ctx: CaptureContext) -> CaptureSpec | None:
    """Restrict a global spec to the positions that a request can reach.

    The request did not choose these positions, so ones past its end are not an error.

    Returns:
        The restricted spec, None if no position is left.

    """
    selected = plain(spec.positions)
    if isinstance(selected, str) or ctx.max_tokens is None:
        return spec
    prompt = ctx.num_prompt_tokens
    end = prompt + ctx.max_tokens - 1
    spans = parse_positions(selected, "positions", fail)
    assert not isinstance(spans, str)
    shifted = (
        (first + prompt, stop + prompt) if first < 0 else (first, stop)
        for first, stop in spans
    )
    reached = [
        [max(first, 0), min(stop, end) - 1]
        for first, stop in shifted
        if first < end and stop > 0
    ]
    return CaptureSpec(spec.hooks, {"ranges": reached}) if reached else None
