# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the edit files of a checkout."""

import runpy
from pathlib import Path

from fork.errors import BuildFailure
from fork.language import Edit, EditFile


def edit_paths(folder: Path) -> dict[str, Path]:
    """Edit files by the upstream module that they edit."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*.py"))
        if path.is_file()
    }


def load_edit_file(module: str, path: Path) -> EditFile:
    """Run an edit file and return its edits.

    Raises:
        BuildFailure: it fails, or has no docstring or no list of edits.
    """
    shown = f"fork/edits/{module}"
    try:
        names = runpy.run_path(str(path))
    except Exception as error:  # a broken edit file may raise anything
        raise BuildFailure(f"{shown} does not load: {error}") from error
    edits = names.get("EDITS")
    if not (names.get("__doc__") or "").strip():
        raise BuildFailure(f"{shown}: say in a docstring why {module} is edited")
    if not isinstance(edits, list) or not edits:
        raise BuildFailure(f"{shown}: needs a list EDITS with at least one edit")
    if not all(isinstance(edit, Edit) for edit in edits):
        raise BuildFailure(f"{shown}: EDITS may hold edits of fork.language only")
    return EditFile(shown, module, tuple(edits))
