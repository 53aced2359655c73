# SPDX-License-Identifier: Apache-2.0
"""Parsing and validation of what users write: hooks, layers and positions."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.bounds import count_values, shown
from vllm.v1.residual.heads import parse_heads
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.row_selection import parse_hooks
from vllm.v1.residual.selectors import POSITION_NAMES as POSITION_NAMES
from vllm.v1.residual.selectors import parse_positions, resolve_positions
from vllm.v1.residual.spans import absolute
from vllm.v1.residual.tap import shape_of

MAX_VALUES = 1 << 16
"""Maximum number of values in a request's `capture` field.

A range of layers counts as its two ends.
"""

_WHY = {  # Of keys that other consumers or earlier builds have.
    "readouts": "; this consumer takes no readouts",
    "encoding": "; with Accept: application/safetensors a response has fewer bytes",
    "codec": "; rows are stored as they are; arrow:compression=zstd compresses",
}


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
    """Parse `{"hooks": {hook: layers}, "positions": selector, "heads": [...]}`.

    Of a consumer that takes results of readouts, `readouts` is one of the extra keys;
    then a spec may have it without `hooks`.

    Args:
        raw: what the user wrote; `positions` defaults to `"last_prompt"`.
        ctx: facts about the request and the model.
        where: the parameter's name in messages, such as `capture.filesystem`.
        extra_keys: allowed keys besides these three; not read here.

    Raises:
        CaptureValidationError: it is invalid; names the parameter, value and remedy.

    """
    raw = plain(raw)
    allowed = {"hooks", "positions", "heads", *extra_keys}
    if not isinstance(raw, dict):
        raise fail(
            f"{where} must be an object with the keys {sorted(allowed)}", where, raw
        )
    if unknown := sorted(str(key) for key in raw if key not in allowed):
        why = _WHY.get(unknown[0], "")
        raise fail(
            f"{where} has no key {shown(unknown[0])}{why}; its keys are "
            f"{sorted(allowed)}",
            f"{where}.{unknown[0]}",
            raw[unknown[0]] if unknown[0] in raw else unknown[0],
        )
    if "hooks" not in raw and raw.get("readouts") is not None:
        for key in raw.keys() & {"positions", "heads"}:
            raise fail(
                f"{where}.{key}: they are those of rows, and there are no hooks; "
                f"give the {key} in the readout",
                f"{where}.{key}",
                raw[key],
            )
        return CaptureSpec({}, "last_prompt")
    hooks = parse_hooks(raw.get("hooks"), ctx, f"{where}.hooks", fail)
    positions = raw.get("positions", "last_prompt")
    resolve_positions(positions, ctx, f"{where}.positions", fail)
    heads: tuple[int, ...] = ()
    if raw.get("heads") is not None:
        for tap in ((n, str(hook)) for hook, layers in hooks.items() for n in layers):
            shape = shape_of(ctx.point_shapes, tap, ctx.hidden_size)
            heads = parse_heads(raw["heads"], tap, shape, f"{where}.heads", fail)
    return CaptureSpec(hooks, positions, heads)


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
    spans = parse_positions(selected, "positions", fail)
    assert not isinstance(spans, str)
    within = absolute(spans, prompt, 0, prompt + ctx.max_tokens - 1)
    reached = [[part.start, part.stop - 1] for part in within]
    return replace(spec, positions={"ranges": reached}) if reached else None
