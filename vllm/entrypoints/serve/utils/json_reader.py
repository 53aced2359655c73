# SPDX-License-Identifier: Apache-2.0
"""Parses JSON without holding the global interpreter lock for long.

`json.loads` holds the lock until it returns, on whatever thread it runs, so a body of
several megabytes would stall every other request. Here long lists and strings are
parsed in pieces, between which other threads run. The size of the rest is bounded.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.entrypoints.serve.utils.json_structure import (
    CLOSE_LIST,
    COMMA,
    LIMITS,
    OPEN_LIST,
    BodyError,
    BodyLimits,
    Structure,
    check_count,
    let_others_run,
    scanned,
    too_large,
)
from vllm.v1.residual.plain_data import unique_object

INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed in one go, in about a millisecond."""
SHORT, SHORT_TEXT = 64, 4096
MAX_DIGITS = 64
"""Most digits of an integer: parsing and printing takes quadratic time."""
_PIECE, _PIECE_BYTES = 1 << 12, 1 << 17
_ESCAPED_BYTES = 1 << 14
"""Size of a piece with escapes: finding where to cut it takes longest."""
_WHOLE = re.compile(
    rb"(?:[^\\]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*+", re.DOTALL
)
"""Matches up to the last place to split: outside escapes and surrogate pairs."""


def read_json(raw: bytes, limits: BodyLimits = LIMITS) -> Any:
    """Parse a body.

    Args:
        raw: JSON in UTF-8, UTF-16 or UTF-32.
        limits: bounds on the size and number of its parts.

    Raises:
        BodyError: the body exceeds a limit, has a lone surrogate, or a key twice in
            one object.
        ValueError: the body is not JSON.

    """
    if len(raw) > limits.num_bytes:
        raise BodyError(too_large(limits))
    encoding = json.detect_encoding(raw)
    if encoding != "utf-8":
        raw = raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    is_small = len(raw) <= INLINE_BYTES
    if is_small and raw.count(b"[") + raw.count(b"{") <= limits.depth:
        found = _loads(raw)
    else:
        structure = scanned(raw, limits)
        found = _loads(raw) if is_small else _in_pieces(raw, structure, limits)
    if (b"\\" in raw and b"\\u" in raw) or b"\xed" in raw:
        _check_text(found)
    return found


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BodyError(f"it has an integer of more than {MAX_DIGITS} digits")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise BodyError(
            "it has an integer of more than 64 bits; send a number with an exponent, "
            "such as 1e30, or text"
        )
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return unique_object(pairs)
    except ValueError as error:
        raise BodyError(str(error)) from None


_DECODER = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_object)


def _loads(raw: bytes) -> Any:
    try:
        return _DECODER.decode(raw.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise BodyError("it is nested too deeply") from None


Span: TypeAlias = tuple[int, int]
"""Offsets of the first and the last byte of a part of a body."""


def _in_pieces(raw: bytes, structure: Structure, limits: BodyLimits) -> Any:
    """Parse a large body: long lists and strings in pieces, then the rest.

    In the rest each of them is replaced by a string with a random prefix, which is
    looked up afterwards.
    """
    nonce = secrets.token_hex(16)
    parts: list[Any] = []
    around: list[bytes] = []
    end = in_lists = 0
    for (begin, stop), signs in _long_parts(structure):
        if begin < end:
            continue  # A string within a long list.
        around += [raw[end:begin], f'"{nonce}{len(parts)}"'.encode()]
        is_list = len(signs) > 0
        parts.append(list(_items(raw, signs)) if is_list else _text(raw, begin, stop))
        in_lists += len(signs)
        end = stop + 1
    around.append(raw[end:])
    loose = b"".join(around)
    check_count(
        "values outside of long lists",
        len(structure.signs) - in_lists,
        limits.loose_values,
    )
    check_count("bytes outside of long lists and texts", len(loose), limits.loose_bytes)
    return _filled(_loads(loose), nonce, parts)


def _long_parts(
    structure: Structure,
) -> list[tuple[Span, npt.NDArray[np.int64]]]:
    """Spans of long strings, and of long lists without lists or objects in them.

    In order of position. Each span comes with the offsets of its brackets and commas;
    strings have none.
    """
    brackets = np.flatnonzero(structure.kinds != COMMA)
    kinds = structure.kinds[brackets]
    flat = (kinds[:-1] == OPEN_LIST) & (kinds[1:] == CLOSE_LIST)
    flat &= np.diff(brackets) > SHORT
    found = []
    for index in np.flatnonzero(flat):
        signs = structure.signs[brackets[index] : brackets[index + 1] + 1]
        found.append(((int(signs[0]), int(signs[-1])), signs))
    nothing = structure.signs[:0]
    even = len(structure.quotes) // 2 * 2
    texts = structure.quotes[:even].reshape(-1, 2)
    for begin, stop in texts[np.diff(texts, axis=1)[:, 0] > SHORT_TEXT]:
        found.append(((int(begin), int(stop)), nothing))
    return sorted(found, key=lambda one: one[0])


def _items(raw: bytes, signs: npt.NDArray[np.int64]) -> Iterator[Any]:
    """Yield the items of a list whose brackets and commas are at `signs`."""
    at, last = 0, len(signs) - 1
    while at < last:
        far = int(np.searchsorted(signs, signs[at] + _PIECE_BYTES)) - 1
        stop = min(max(far, at + 1), at + _PIECE, last)
        piece = raw[int(signs[at]) + 1 : int(signs[stop])]
        at = stop
        text = piece.strip() if len(piece) > _PIECE_BYTES else b""
        if len(text) > _PIECE_BYTES:
            if text[:1] != b'"' or text[-1:] != b'"':
                raise BodyError(f"it has a number of more than {_PIECE_BYTES} digits")
            yield _text(text, 0, len(text) - 1)
            continue
        let_others_run()
        items = _loads(b"[" + piece + b"]")
        if not items:
            raise ValueError(f"a value is missing before byte {int(signs[stop])}")
        yield from items


def _text(raw: bytes, begin: int, stop: int) -> str:
    """Parse the string between the quotes at `begin` and `stop`."""
    pieces = []
    at = begin + 1
    escapes = raw.find(b"\\", at, stop) >= 0
    size = min(_PIECE_BYTES, _ESCAPED_BYTES) if escapes else _PIECE_BYTES
    while at < stop:
        end = min(at + size, stop)
        if escapes and end < stop:
            found = _WHOLE.match(raw, at, end)
            end = found.end() if found is not None else at
        while end < stop and raw[end] & 0xC0 == 0x80:
            end += 1  # Do not split a UTF-8 character.
        if end == at:
            raise BodyError("it contains an invalid escape in a text")
        let_others_run()
        pieces.append(_loads(b'"' + raw[at:end] + b'"'))
        at = end
    return "".join(pieces)


def _filled(found: Any, nonce: str, parts: list[Any]) -> Any:
    """Replace the placeholders, recognised by `nonce`, by the parts.

    Raises:
        BodyError: a placeholder is a key, that is, a key was a long string.

    """

    def wanted(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(nonce):
            return parts[int(value[len(nonce) :])]
        return value

    root = [found]
    waiting: list[Any] = [root]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict) and any(key.startswith(nonce) for key in here):
            raise BodyError(f"it has a name of more than {SHORT_TEXT} bytes")
        items = list(here.items() if isinstance(here, dict) else enumerate(here))
        for at, old in items:
            if isinstance(old, (dict, list)):
                waiting.append(old)
            elif (new := wanted(old)) is not old:
                here[at] = new
    return root[0]


def _check_text(found: Any) -> None:
    """Reject lone surrogates, which cannot be encoded in a response.

    Raises:
        BodyError: a string or key contains one.

    """
    waiting = [found]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict):
            waiting += [*here, *here.values()]
        elif isinstance(here, list):
            waiting += here
        elif isinstance(here, str) and not here.isascii():
            try:
                here.encode()
            except UnicodeEncodeError:
                raise BodyError(
                    "it contains text with a lone surrogate, which is not Unicode; "
                    "remove it"
                ) from None
