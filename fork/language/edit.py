# SPDX-License-Identifier: Apache-2.0
"""Edits: what they are looked up by, and the changes of bytes that they become."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fork.language.source import Owner, Source


@dataclass(frozen=True, slots=True)
class Splice:
    """Bytes that replace those between two offsets of the module."""

    start: int
    end: int
    new: bytes
    rank: int = 1
    """Order of splices at one offset: what ends inner blocks comes first."""


Search = Callable[[Source, Owner], Iterator[Splice]]
"""Yields a splice for each match in one scope, without entering inner definitions."""


class Misfit(Exception):
    """An edit does not fit the module.

    Args:
        kind: the kind of reason, for programs.
        text: what follows the edit in a sentence.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit of an upstream module.

    Raises:
        ValueError: `why` is empty or `count` is below 1.
    """

    operation: str
    subject: str
    """What the edit is about, for messages: the anchor, parameter or import."""
    search: Search
    why: str
    """The reason, one sentence."""
    scope: str
    """Dotted path of the class or function; empty for the module level."""
    line: int
    """The line of the edit file, for messages."""
    count: int = 1
    """The exact number of places that must match."""
    since: str = ""
    """The first release that the edit is for; empty for any."""
    until: str = ""
    """The first release that it is not for; empty for none."""

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("why='': say in one sentence why this edit is needed")
        if self.count < 1:
            raise ValueError(f"count={self.count}: an edit matches at least one place")

    def applies_to(self, release: str) -> bool:
        """Whether the edit is for a release, such as `0.32.0`."""
        number = _number(release)
        return not (self.since and number < _number(self.since)) and not (
            self.until and number >= _number(self.until)
        )

    def resolve(self, source: Source) -> list[Splice]:
        """The changes that this edit makes.

        Raises:
            Misfit: it does not match as often as it says.
        """
        scopes = source.scopes(self.scope)
        if not scopes:
            raise self._no_scope(source)
        splices = [splice for s in scopes for splice in self.search(source, s)]
        if not splices:
            raise self._no_match(source)
        if len(splices) != self.count:
            raise Misfit(
                "WrongCount",
                f"matches {len(splices)} places {_in(self.scope)}, expected "
                f"{self.count},",
            )
        return splices

    def _no_scope(self, source: Source) -> Misfit:
        name = self.scope.split(".")[-1]
        paths = (path for path, _ in source.all_scopes())
        same = [path for path in dict.fromkeys(paths) if path.split(".")[-1] == name]
        text = f'needs scope "{self.scope}", which {source.module} does not have'
        if same:
            text += f" (moved? the name is defined as {', '.join(same)})"
        return Misfit("MissingScope", text)

    def _no_match(self, source: Source) -> Misfit:
        text = f"matches nothing {_in(self.scope)} of {source.module}"
        there = (p for p, s in source.all_scopes() if any(self.search(source, s)))
        moved = ", ".join(map(_in, dict.fromkeys(there)))
        if moved:
            return Misfit("Moved", f"{text}; it is now {moved}")
        return Misfit("MissingAnchor", text)


def edit(
    subject: str, search: Search, *, why: str, scope: str = "", count: int = 1
) -> Edit:
    """The edit of the operation that calls this, which an edit file has called."""
    operation = sys._getframe(1)
    assert operation.f_back is not None, "an operation is called by an edit file"
    return Edit(
        operation=operation.f_code.co_name,
        subject=subject,
        search=search,
        why=why,
        scope=scope,
        line=operation.f_back.f_lineno,
        count=count,
    )


def _in(scope: str) -> str:
    return f'in scope "{scope}"' if scope else "at the module level"


def _number(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared; suffixes are left out."""
    digits = re.match(r"\d+(\.\d+)*", release)
    assert digits is not None, f"not a release: {release!r}"
    return tuple(map(int, digits[0].split(".")))


def since(release: str, *edits: Edit) -> list[Edit]:
    """The edits, for upstream's `release` and later ones."""
    return [replace(edit, since=release) for edit in edits]


def until(release: str, *edits: Edit) -> list[Edit]:
    """The edits, for releases before upstream's `release`."""
    return [replace(edit, until=release) for edit in edits]
