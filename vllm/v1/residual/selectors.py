# SPDX-License-Identifier: Apache-2.0
"""The grammar of position selectors, for capture and steering.

A list of token positions, of which negative ones count from the prompt's end;
`{"last": k}`, the last k tokens of the prompt; `{"ranges": [[first, last], ...]}`, both
included; or one of `POSITION_NAMES`.

This module imports neither torch nor anything of capture or steering, because
`vllm.sampling_params` imports it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm.v1.residual.bounds import counted
from vllm.v1.residual.numbers import Fail, is_integer
from vllm.v1.residual.spans import (
    FARTHEST,
    LAST_ROW,
    OPEN_END,
    Spans,
    merged,
    spans_of,
)

if TYPE_CHECKING:
    from vllm.v1.residual.row_selection import CaptureContext

PositionName = Literal[
    "all", "last_prompt", "all_prompt", "all_generated", "last_generated"
]
POSITION_NAMES: tuple[PositionName, ...] = (
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "all",
)

MAX_POSITIONS = 1 << 16
"""Most positions of a list, and most ranges of one selector."""


def parse_positions(raw: Any, at: str, fail: Fail) -> PositionName | Spans:
    """Parse a selector of positions.

    Args:
        raw: the value that the user wrote; an array or a `range` counts as a list.
        at: the parameter's name in messages.
        fail: creates the exception to raise.

    Returns:
        A name of `POSITION_NAMES`, or the spans of a list, of the last k tokens, or of
        ranges.

    """
    if isinstance(raw, str) and raw in POSITION_NAMES:
        return cast("PositionName", raw)
    if isinstance(raw, Mapping):
        return _position_ranges(raw, at, fail)
    raw = as_list(raw)
    if not isinstance(raw, (list, tuple)) or not raw:
        raise fail(
            f"{at} must be a list of token positions that is not empty (negative ones "
            f"count from the prompt's end), one of {list(POSITION_NAMES)}, "
            '{"last": k} for the last k tokens of the prompt, or '
            '{"ranges": [[first, last], ...]}',
            at,
            raw,
        )
    if len(raw) > MAX_POSITIONS:
        raise fail(f"{at}: at most {MAX_POSITIONS} positions", at, len(raw))
    for value in raw:
        if not is_index(value):
            raise fail(
                f"{at}: a position must be an integer, within 2**31 of the prompt's "
                "start or end",
                at,
                value,
            )
    return spans_of(int(position) for position in raw)


def resolve_positions(raw: Any, ctx: "CaptureContext", where: str, fail: Fail) -> Spans:
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
            "(the last token is never fed back); leave it out or raise max_tokens",
            where,
            outside,
        )
    return merged(
        (max(first + shift, 0), stop + shift)
        for first, stop in found
        for shift in (prompt if first < 0 else 0,)
    )


def first_outside(spans: Spans, num_prompt: int, end: int) -> int | None:
    """The first selected position that a request does not have; None if it has all.

    Args:
        spans: the selected positions.
        num_prompt: number of prompt tokens.
        end: the position after the request's last one.

    Returns:
        A negative position lies before the prompt's start, another one beyond the end.

    """
    for first, stop in spans:
        shift = num_prompt if first < 0 else 0
        if first + shift < 0 and stop != 0:  # `{"last": k}` ends at 0, and is cut.
            return first
        if stop + shift > end:
            return stop - 1
    return None


def as_list(raw: Any) -> Any:
    """An array, a tensor or a `range` as a list; other values are unchanged."""
    if isinstance(raw, range):
        return list(raw)
    to_list = getattr(raw, "tolist", None)
    return raw if to_list is None else to_list()


def is_index(value: Any) -> bool:
    """Whether a value is an integer in the range of positions."""
    return is_integer(value, -FARTHEST, FARTHEST)


def _position_ranges(raw: Mapping[Any, Any], at: str, fail: Fail) -> Spans:
    if raw.keys() == {"last"} and is_index(raw["last"]) and raw["last"] >= 1:
        return ((-int(raw["last"]), 0),)
    pairs = as_list(raw.get("ranges"))
    if raw.keys() != {"ranges"} or not isinstance(pairs, (list, tuple)) or not pairs:
        raise fail(
            f'{at} must be a list, {{"last": k}} with k from 1, or '
            '{"ranges": [[first, last], ...]}',
            at,
            raw,
        )
    if len(pairs) > MAX_POSITIONS:
        raise fail(f"{at}: at most {MAX_POSITIONS} ranges", at, len(pairs))
    found = []
    for pair in pairs:
        first, last = parse_pair(pair, f"{at}.ranges", fail)
        if (first < 0) != (last < 0):
            raise fail(
                f"{at}.ranges: both ends must count from the prompt's start, or both, "
                "negative, from its end",
                f"{at}.ranges",
                pair,
            )
        found.append((first, last + 1))
    return merged(found)


def parse_pair(pair: Any, at: str, fail: Fail) -> tuple[int, int]:
    """A pair `[first, last]` of a selector, both included."""
    pair = as_list(pair)
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    if not is_pair or not all(map(is_index, pair)) or pair[0] > pair[1]:
        raise fail(
            f"{at}: must hold pairs [first, last] of whole numbers with first <= last, "
            "both included",
            at,
            pair,
        )
    return int(pair[0]), int(pair[1])
