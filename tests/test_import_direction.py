# SPDX-License-Identifier: Apache-2.0
"""The packages of `vllm/` and `client/` import each other as the map draws it.

The arrows are derived from all imports, also from those inside functions. Within a
process, entry points -> front end -> engine core -> worker -> layers: each imports
later ones, and shared packages. The framework of capture imports no consumer.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
TOOLS = ("vllm.entrypoints", "vllm.capture_dataset", "vllm.patching")
SHARED = ("vllm.v1.residual", "vllm.model_executor", "vllm.utils")
FEATURES = ("vllm.v1.capture", "vllm.v1.steering", "vllm.v1.readouts", "vllm.v1.hooks")
ENGINE = (*SHARED, *FEATURES, "vllm.config")
MAP: dict[str, tuple[str, ...]] = {
    "vllm.utils": (),
    "vllm.v1.residual": ("vllm.utils",),
    "vllm.model_executor": ("vllm.v1.residual", "vllm.utils"),
    "vllm.config": SHARED,
    # The features know what they share, and nothing of each other.
    "vllm.v1.capture": (*SHARED, "vllm.config", "clearbox_client"),  # In notebooks.
    "vllm.v1.steering": (*SHARED, "vllm.config"),
    "vllm.v1.readouts": (*SHARED, "vllm.config", "clearbox_client"),  # In notebooks.
    "vllm.v1.hooks": (*SHARED, "vllm.config"),
    # One place for each process, in which the features meet.
    "vllm.v1.residual.frontend": (*ENGINE, "vllm.v1.residual.core", "clearbox_client"),
    "vllm.v1.residual.core": ENGINE,
    "vllm.v1.residual.worker": ENGINE,
    "vllm.v1.worker": (*ENGINE, "vllm.v1.residual.worker"),
    # Tools and adapters around an engine, which imports none of them.
    "vllm.steering": (*ENGINE, "clearbox_client"),
    "vllm.capture_dataset": (*ENGINE, "clearbox_client"),
    "vllm.patching": (*ENGINE, "clearbox_client"),
    "vllm.interop": (*ENGINE, "vllm.steering", "clearbox_client"),
    "vllm.entrypoints": (
        *ENGINE,
        "vllm.steering",
        "vllm.capture_dataset",
        "vllm.patching",
        "vllm.interop",
        "clearbox_client",
    ),
    "clearbox_client": (),
}
"""The packages that each one may import; the longest name counts. Any other arrow
between them is wrong. `ARCHITECTURE.md` shows the same."""
NOT_YET = {
    # Settings of another library become options, by its adapter.
    ("vllm.v1.capture", "vllm.interop"),
    # A function of the earlier public fork, under its name.
    ("vllm.config", "vllm.v1.steering"),
    ("vllm.v1.residual", "vllm.v1.worker"),
}
"""Arrows that the map does not draw and that still exist."""
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
    named = {}
    for folder in (ROOT / "vllm", ROOT / "client" / "clearbox_client"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def mapped(module: str) -> str | None:
    """The package of the map that a module belongs to; None if there is none."""
    names = (name for name in MAP if f"{module}.".startswith(f"{name}."))
    return max(names, key=len, default=None)


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


def map_arrows() -> dict[tuple[str | None, str | None], list[str]]:
    """The imports by the packages of the map, nested ones too, within none of them."""
    imports = defaultdict(list)
    for name, tree in trees().items():
        for target in imported(tree, nested=True):
            pair = mapped(name), mapped(target)
            if pair[0] != pair[1]:
                imports[pair].append(f"{name} imports {target}")
    return dict(imports)


def test_the_map_has_every_package() -> None:
    assert not [name for name in modules() if mapped(name) is None]
    assert {target for targets in MAP.values() for target in targets} <= MAP.keys()


def test_packages_import_what_the_map_draws() -> None:
    wrong = {
        pair: who
        for pair, who in map_arrows().items()
        if pair not in NOT_YET and pair[1] not in MAP[str(pair[0])]
    }
    assert not wrong


def test_the_framework_imports_no_consumer() -> None:
    wrong = [
        who
        for (package, target), who in arrows().items()
        if target.startswith(CONSUMERS)
        and package.startswith("vllm.v1.")
        and not package.startswith(CONSUMERS)
        and package != "vllm.v1.residual.frontend"  # It has their public methods.
    ]
    assert not wrong
