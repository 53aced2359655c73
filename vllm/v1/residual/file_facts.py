# SPDX-License-Identifier: Apache-2.0
"""Facts that are appended to a file's name, as in `FILE?hook=post_block&layer=15`."""

from pathlib import Path


def split_facts(path: str | Path) -> tuple[Path, str]:
    """Split a path into the file and the text of the appended facts."""
    file = Path(path)
    if file.exists() or "?" not in file.name:
        return file, ""
    name, _, facts = str(path).rpartition("?")
    return Path(name), facts
