# SPDX-License-Identifier: Apache-2.0
"""The packages of `vllm/` import each other in one direction, without cycles.

Entry points -> front end -> engine core -> worker -> layers: each imports later ones,
and shared packages. Capture and steering do not import each other, and the framework of
capture imports no consumer.
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
    "vllm.model_executor": 0,
}
"""Stages by a package's name or a part of it; the first match counts."""
TOOLS = ("vllm.entrypoints", "vllm.capture_dataset")
CONSUMERS = "vllm.v1.capture.consumers"

Arrows = dict[tuple[str, str], set[str]]
"""The importing modules, by `(package, imported package)`."""


def stage_of(package: str) -> int | None:
    """The stage of a package; None for packages that all may import."""
    parts = package.split(".")
    for name, stage in STAGES.items():
        if name in parts or package == name or package.startswith(f"{name}."):
            return stage
    return None


@cache
def modules() -> dict[str, Path]:
    """Our modules by name."""
    found = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package_of(module: str) -> str:
    """The package of a module; an entry point or tool counts as one package."""
    is_package = modules()[module].name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    tools = (t for t in TOOLS if f"{package}.".startswith(f"{t}."))
    return next(tools, package)


def imported(tree: ast.Module, nested: bool) -> Iterator[str]:
    """Our modules that a file imports; with `nested`, also inside functions."""
    known = modules()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known or node.module in known:
                    yield name if name in known else node.module


@cache
def trees() -> dict[str, ast.Module]:
    return {
        name: ast.parse(path.read_text(encoding="utf-8"))
        for name, path in modules().items()
    }


@cache
def arrows(nested: bool = True) -> Arrows:
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for target in imported(tree, nested):
            pair = package_of(name), package_of(target)
            if pair[0] != pair[1]:
                found[pair].add(f"{name} imports {target}")
    return dict(found)


def circles(found: Arrows) -> list[set[str]]:
    """The imports between packages that form cycles."""
    targets: defaultdict[str, set[str]] = defaultdict(set)
    for package, target in found:
        targets[package].add(target)

    def reached(package: str) -> set[str]:
        seen: set[str] = set()
        ahead = set(targets[package])
        while ahead:
            seen |= ahead
            ahead = {t for p in ahead for t in targets[p]} - seen
        return seen

    from_there = {package: reached(package) for package in list(targets)}
    return [
        who
        for (package, target), who in sorted(found.items())
        if package in from_there.get(target, ())
    ]


def test_each_stage_imports_what_comes_after_it_only() -> None:
    wrong = set()
    for (package, target), who in arrows().items():
        stage, other = stage_of(package), stage_of(target)
        if stage is not None and other is not None and stage < other:
            wrong |= who
    assert not wrong


def test_packages_import_each_other_in_no_circle() -> None:
    assert not circles(arrows(nested=False))


def test_a_circle_would_be_found() -> None:
    one, other, rest = {"a imports b"}, {"b imports a"}, {"c imports a"}
    assert circles({("a", "b"): one, ("c", "a"): rest}) == []
    assert circles({("a", "b"): one, ("b", "a"): other, ("c", "a"): rest}) == [
        one,
        other,
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("vllm.v1.capture", "vllm.v1.steering"),
        ("vllm.v1.steering", "vllm.v1.capture"),
        ("vllm.v1.residual", "vllm.v1.capture"),
        ("vllm.v1.residual", "vllm.v1.steering"),
    ],
)
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
        if target.startswith(CONSUMERS)
        and package.startswith("vllm.v1.")
        and not package.startswith(CONSUMERS)
    ]
    assert not wrong
