# SPDX-License-Identifier: Apache-2.0
"""Inserts into a comma-separated list and continues its layout."""

from typing import TypeVar

import libcst as cst

Item = TypeVar("Item", cst.Arg, cst.Param)
Whitespace = cst.BaseParenthesizableWhitespace


def insert_item(
    items: list[cst.CSTNode], index: int, new: cst.CSTNode, opening: Whitespace
) -> list[cst.CSTNode]:
    """The list with `new` at `index`, laid out like its neighbours.

    Args:
        items: arguments or parameters, each with its comma.
        index: index of the new item.
        new: the item without a comma.
        opening: whitespace after the opening parenthesis, used as the separator's if
            the list has only one item.
    """
    if not items:
        return [new]
    if index == 0:
        return [new.with_changes(comma=_separator(items, opening)), *items]
    previous = items[index - 1]
    if index < len(items):
        own, passed_on = _split(_comma(previous))
        new = new.with_changes(comma=passed_on)
        previous = previous.with_changes(comma=own)
    else:
        previous, new = _append(previous, new, _separator(items, opening))
    return [*items[: index - 1], previous, new, *items[index:]]


def _append(
    previous: cst.CSTNode, new: cst.CSTNode, separator: cst.Comma
) -> tuple[cst.CSTNode, cst.CSTNode]:
    """Append an item, which takes over the end of the list with its trailing comma."""
    closing = _closing_field(previous)
    end = {closing: getattr(previous, closing)} if closing else {}
    new = new.with_changes(comma=_without_comment(previous.comma), **end)  # type: ignore[attr-defined]  # every list item has one
    blank = {closing: cst.SimpleWhitespace("")} if closing else {}
    separator = _with_comment_of(previous.comma, separator)  # type: ignore[attr-defined]  # as above
    return previous.with_changes(comma=separator, **blank), new


def _closing_field(item: cst.CSTNode) -> str | None:
    for name in ("whitespace_after_arg", "whitespace_after_param"):
        if hasattr(item, name):
            return name
    return None


def _comma(item: cst.CSTNode) -> cst.Comma:
    comma = getattr(item, "comma", None)
    if isinstance(comma, cst.Comma):
        return comma
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _separator(items: list[cst.CSTNode], opening: Whitespace) -> cst.Comma:
    if len(items) > 1:
        return _split(_comma(items[0]))[1]
    if isinstance(opening, cst.ParenthesizedWhitespace):
        return cst.Comma(whitespace_after=opening)
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _split(comma: cst.Comma) -> tuple[cst.Comma, cst.Comma]:
    """The commas of the previous item and of the new item.

    A comment on the previous item's line stays with it; comments on lines of their own
    belong to the item that follows.
    """
    space = comma.whitespace_after
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return comma, comma
    own = space.with_changes(empty_lines=())
    bare = cst.TrailingWhitespace(newline=space.first_line.newline)
    passed_on = space.with_changes(first_line=bare)
    return (
        comma.with_changes(whitespace_after=own),
        comma.with_changes(whitespace_after=passed_on),
    )


def _without_comment(
    comma: cst.Comma | cst.MaybeSentinel,
) -> cst.Comma | cst.MaybeSentinel:
    if not isinstance(comma, cst.Comma):
        return comma
    return _split(comma)[1]


def _with_comment_of(
    comma: cst.Comma | cst.MaybeSentinel, separator: cst.Comma
) -> cst.Comma:
    """The separator, with the comment that followed the trailing comma."""
    if not isinstance(comma, cst.Comma):
        return separator
    old, new = comma.whitespace_after, separator.whitespace_after
    if not isinstance(old, cst.ParenthesizedWhitespace) or not isinstance(
        new, cst.ParenthesizedWhitespace
    ):
        return separator
    space = new.with_changes(first_line=old.first_line, empty_lines=())
    return separator.with_changes(whitespace_after=space)
