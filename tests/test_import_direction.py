# SPDX-License-Identifier: Apache-2.0
"""The packages of `vllm/` import each other in one direction, and in no circle.

Entry points -> front end -> engine core -> worker -> layers: each imports what comes
after it, and what all of them share. Capture and steering do not import each other,
and the framework of capture imports no consumer.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = {
    "vllm.entrypoints": 4,
    "frontend": 3,
    "core": 2,
    "worker": 1,
    "dispatch": 1,
    "delivery": 1,
    "transport": 1,
    "staging": 1,
    "layers": 0,
}
"""By a package's whole name, or by a part of it: of several, the first that fits."""
CONSUMERS = "vllm.v1.capture.consumers"


def stage_of(package: str) -> int | None:
    """Where a package stands in the direction; None for what all may import."""
    parts = package.split(".")
    for name, stage in STAGES.items():
        if name in parts or package == name or package.startswith(f"{name}."):
            return stage
    return None


@cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Our modules by name."""
    found = {}
    for path in sorted(root.joinpath("vllm").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules among `known` that one file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known or node.module in known:
                    yield name if name in known else node.module


@cache
def arrows() -> dict[tuple[str, str], set[str]]:
    """`(package, imported package)` -> the modules that do so."""
    known = modules()
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for name, path in known.items():
        for target in imported(path, known):
            pair = package_of(name, known), package_of(target, known)
            if pair[0] != pair[1]:
                found[pair].add(f"{name} imports {target}")
    return dict(found)


def package_of(module: str, known: dict[str, Path]) -> str:
    is_package = known[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def test_each_stage_imports_what_comes_after_it_only() -> None:
    wrong = set()
    for (package, target), who in arrows().items():
        stage, other = stage_of(package), stage_of(target)
        if stage is not None and other is not None and stage < other:
            wrong |= who
    assert not wrong


def test_packages_import_each_other_in_no_circle() -> None:
    targets: defaultdict[str, set[str]] = defaultdict(set)
    for package, target in arrows():
        targets[package].add(target)
    ends: set[str] = set()  # Packages from which no circle can be reached.
    while leaves := {p for p in targets if p not in ends and targets[p] <= ends} | {
        t
        for found in targets.values()
        for t in found
        if t not in targets and t not in ends
    }:
        ends |= leaves
    rest = set(targets) - ends
    circle = [
        who for (a, b), who in sorted(arrows().items()) if a in rest and b in rest
    ]
    assert not circle


@pytest.mark.parametrize(("one", "other"), [("vllm.v1.steering", "vllm.v1.capture")])
def test_features_do_not_import_each_other(one: str, other: str) -> None:
    wrong = [
        who
        for (package, target), who in arrows().items()
        if f"{package}.".startswith(f"{one}.") and f"{target}.".startswith(f"{other}.")
    ]
    assert not wrong


def test_the_framework_imports_no_consumer() -> None:
    wrong = [
        who
        for (package, target), who in arrows().items()
        if target.startswith(CONSUMERS) and not package.startswith(CONSUMERS)
    ]
    assert not wrong
