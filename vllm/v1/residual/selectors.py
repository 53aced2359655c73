# SPDX-License-Identifier: Apache-2.0
"""The grammar of position and layer selectors, for capture and steering.

Positions: a list of token positions, of which negative ones count from the prompt's
end; `{"last": k}`, the last k tokens of the prompt; `{"ranges": [[first, last], ...]}`,
both included; or one of `POSITION_NAMES`.

Layers: an index, or its text; a text of indices and ranges such as `"0,4-7"`; `"all"`;
a list of these; or `{"layers": [...], "ranges": [[first, last], ...]}`.

This module imports neither torch nor anything of capture or steering, because
`vllm.sampling_params` imports it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.numbers import Fail, is_integer
from vllm.v1.residual.spans import FARTHEST, Spans, merged, spans_of

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

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)


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
        first, last = _pair(pair, f"{at}.ranges", fail)
        if (first < 0) != (last < 0):
            raise fail(
                f"{at}.ranges: both ends must count from the prompt's start, or both, "
                "negative, from its end",
                f"{at}.ranges",
                pair,
            )
        found.append((first, last + 1))
    return merged(found)


def _pair(pair: Any, at: str, fail: Fail) -> tuple[int, int]:
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


def parse_layers(
    raw: Any, having: Sequence[int], num_layers: int, at: str, fail: Fail
) -> list[int]:
    """Parse a selector of layers; returns layer indices, sorted.

    Args:
        raw: the value that the user wrote.
        having: the layers that may be selected, ascending.
        num_layers: number of layers of the model.
        at: the parameter's name in messages.
        fail: creates the exception to raise.

    """
    found = _layer_spans(raw, having, at, fail)
    if not found:
        raise fail(f"{at} selects no layer; name one or leave it out", at, raw)
    for first, last in found:
        for layer in (first, last):
            if not 0 <= layer < num_layers:
                raise fail(
                    f"{at}: layer {layer} is outside of this model's layers "
                    f"0 to {num_layers - 1}; name one of them",
                    at,
                    layer,
                )
    layers = sorted({n for first, last in found for n in range(first, last + 1)})
    known = set(having)
    for layer in layers:
        if layer not in known:
            raise fail(
                f"{at}: layer {layer} of this model does not have this hook "
                f"point; these have it: {listed(having)}",
                at,
                layer,
            )
    return layers


def _layer_spans(
    raw: Any, having: Sequence[int], at: str, fail: Fail
) -> list[tuple[int, int]]:
    """Pairs of the first and the last layer, both included, not yet checked."""
    if isinstance(raw, str):
        if raw.strip() == "all":
            return [(layer, layer) for layer in having]
        return _written(raw, at, fail)
    if isinstance(raw, Mapping):
        if not raw or raw.keys() - {"layers", "ranges"}:
            raise _no_layers(raw, at, fail)
        layers = _a_list(raw.get("layers", []), f"{at}.layers", fail)
        ranges = _a_list(raw.get("ranges", []), f"{at}.ranges", fail)
        pairs = [_pair(pair, f"{at}.ranges", fail) for pair in ranges]
        return [*_listed(layers, having, f"{at}.layers", fail), *pairs]
    raw = as_list(raw)
    if isinstance(raw, (list, tuple)):
        return _listed(raw, having, at, fail)
    if not is_integer(raw):
        raise _no_layers(raw, at, fail)
    return [(int(raw), int(raw))]


def _listed(
    raw: Sequence[Any], having: Sequence[int], at: str, fail: Fail
) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for value in raw:
        if not isinstance(value, str) and not is_integer(value):
            raise fail(f"{at}: a layer must be an integer", at, value)
        spans += _layer_spans(value, having, at, fail)
    return spans


def _written(text: str, at: str, fail: Fail) -> list[tuple[int, int]]:
    """Parse a text such as `"0,4-7"`."""
    parts = [_RANGE.fullmatch(part) for part in text.split(",", MAX_POSITIONS)]
    spans = []
    for part in parts:
        if part is None:
            raise _no_layers(text, at, fail)
        first, last = part.groups()
        spans.append((int(first), int(first if last is None else last)))
        if spans[-1][0] > spans[-1][1]:
            raise fail(f"{at}: a range of layers needs first <= last", at, text)
    return spans


def _no_layers(raw: Any, at: str, fail: Fail) -> Exception:
    return fail(
        f"{at}: {shown(raw)} selects no layers; a layer is a 0-based index; give "
        'a list of indices, a text such as "0,4-7", "all", or '
        '{"layers": [...], "ranges": [[first, last], ...]}',
        at,
        raw,
    )


def _a_list(raw: Any, at: str, fail: Fail) -> Sequence[Any]:
    raw = as_list(raw)
    if not isinstance(raw, (list, tuple)):
        raise fail(f"{at} must be a list", at, raw)
    return raw
