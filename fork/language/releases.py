# SPDX-License-Identifier: Apache-2.0
"""Edits that are for some releases only, where no anchor fits all of them."""

from dataclasses import replace

from fork.language.edit import Edit


def since(release: str, *edits: Edit) -> list[Edit]:
    """The edits, for upstream's `release` and later ones."""
    return [replace(edit, since=release) for edit in edits]


def until(release: str, *edits: Edit) -> list[Edit]:
    """The edits, for releases before upstream's `release`."""
    return [replace(edit, until=release) for edit in edits]
