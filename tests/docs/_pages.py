# SPDX-License-Identifier: Apache-2.0
"""The documentation pages and their content."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, without their indentation."""
    found = []
    for indent, name, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if name == language:
            found.append(re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
    return found
