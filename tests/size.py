# SPDX-License-Identifier: Apache-2.0
"""Counts lines of code against the budget: `make size`, a part of `make lint`.

A line counts if it has code: blank lines, comments and docstrings do not, nor do
strings that document a field. `size.toml` has the budget of each folder; a change that
needs more raises it there, with a reason.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
C_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def python_lines(source: str) -> int:
    """Lines of Python with code other than a bare string."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                documented.update(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def c_lines(source: str) -> int:
    """Lines of C++ with code."""
    text = C_COMMENT.sub(
        lambda match: match[0] if match[0].startswith('"') else "\n", source
    )
    return sum(bool(line.strip()) for line in text.splitlines())


def lines_of(path: Path) -> int:
    """Lines of code of a file; 0 for a file that is not code."""
    if path.suffix == ".py":
        return python_lines(path.read_text(encoding="utf-8"))
    return c_lines(path.read_text(encoding="utf-8")) if path.suffix in C_SUFFIXES else 0


def tracked(folders: list[str]) -> list[Path]:
    """Files of these folders that git tracks or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [p for name in run.stdout.splitlines() if (p := ROOT / name).is_file()]


def count(folders: list[str], depth: int) -> Counter[str]:
    """Lines of code by folder, of at most `depth` parts."""
    counted: Counter[str] = Counter()
    for path in tracked(folders):
        folder = path.relative_to(ROOT).parts[:-1][:depth]
        counted["/".join(folder)] += lines_of(path)
    return counted


def edits() -> int:
    """Edits of upstream's files as they are written: a shared group counts as one."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8")) for path in tracked(["fork/edits"])
    )
    lists = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.List))
    return sum(isinstance(e, ast.Call | ast.Starred) for n in lists for e in n.elts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=0, help="also list folders")
    depth = parser.parse_args().depth
    budget = tomllib.loads((ROOT / "size.toml").read_text(encoding="utf-8"))
    print(f"{'':32}{'lines':>8}{'budget':>8}")
    above = []
    for name, entry in budget.items():
        folders = entry.get("folders")
        size = sum(count(folders, 1).values()) if folders else edits()
        print(f"{name:32}{size:8,}{entry['lines']:8,}")
        if size > entry["lines"]:
            above.append(name)
        if depth and folders:
            for folder, lines in sorted(count(folders, depth).items()):
                print(f"  {folder:30}{lines:8,}")
    if above:
        print(
            f"above the budget: {', '.join(above)}; leave something out, or raise the "
            "budget in size.toml and say why there",
            file=sys.stderr,
        )
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
