# SPDX-License-Identifier: Apache-2.0
"""Patterns of the file names that the layouts write.

Clients choose the names of directories, and there may be unrelated files. Only regular
files that match a pattern belong to a layout.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vllm.v1.residual.readout_plan import ATTN_REST, REST
from vllm.v1.residual.tap import HOOK_NAMES

_STAGE = r"(?:-pp\d\d)?"
SHARD = re.compile(rf"(shard{_STAGE}-\d{{3}})-(\d{{5,12}})\.(bin|json)")
_PLACE = "|".join([*HOOK_NAMES, REST, ATTN_REST, r"head_\d+"])
"""Hook points, and the components of attributions that are none."""
OWN = re.compile(
    rf"(?:\d{{1,6}}_(?:{_PLACE})(?:\.[\w.-]+)?|packed{_STAGE})\.(?:bin|json)",
    re.ASCII,
)
"""Files in the directory of one request."""
PACKED = re.compile(rf"packed{_STAGE}\.json")


def files_of(folder: str | Path, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the matches of file names in a directory, which may be missing."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                found = pattern.fullmatch(entry.name)
                if found is not None and entry.is_file():
                    yield found
    except (FileNotFoundError, NotADirectoryError):
        return


def indices_in(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The matching JSON files of a directory, by ascending modification time."""
    names = (found[0] for found in files_of(folder, pattern))
    paths = [folder / name for name in names if name.endswith(".json")]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))
