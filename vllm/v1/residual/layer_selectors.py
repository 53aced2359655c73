# SPDX-License-Identifier: Apache-2.0
"""The grammar of layer selectors, for capture and steering.

An index, or its text; a text of indices and ranges such as `"0,4-7"`; `"all"`; a list
of these; or `{"layers": [...], "ranges": [[first, last], ...]}`. Captures, readouts,
steering entries, patch grids and the reader of probes' files name layers by it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.numbers import Fail, is_integer
from vllm.v1.residual.selectors import MAX_POSITIONS, as_list, parse_pair

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)


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
        pairs = [parse_pair(pair, f"{at}.ranges", fail) for pair in ranges]
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
