# SPDX-License-Identifier: Apache-2.0
"""Weaves a release file by file: first the edits, then the decoder layers."""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fork.errors import BuildFailure, Fault
from fork.language import weave
from fork.paths import Checkout
from fork.upstream.release import Release
from fork.weaving.cache import (
    digest_of,
    forget_unused,
    keep,
    language_digest,
    recall,
    weave_digest,
)
from fork.weaving.edit_files import edit_paths, load_edit_file

_MODEL_FOLDERS = ("vllm/model_executor/models/", "vllm/models/")
_POOL_FROM = 4
"""With fewer files than this, starting processes takes longer than weaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One file to weave."""

    module: str
    version: str
    upstream: Path
    edit_file: Path | None
    has_layers: bool
    key: str
    """Hash of everything that the result depends on."""


@dataclass(frozen=True, slots=True)
class WovenFile:
    """The result of weaving one file."""

    module: str
    source: str | None
    """None if nothing changed, or if something does not fit."""
    faults: tuple[Fault, ...]
    layers: tuple[str, ...] = ()
    """Names of its decoder-layer classes, including refused ones."""


def weave_release(checkout: Checkout, release: Release, jobs: int) -> list[WovenFile]:
    """Weave every file that has edits or may hold decoder layers."""
    tasks, orphans = plan(checkout, release)
    return orphans + _run(tasks, jobs)


def plan(checkout: Checkout, release: Release) -> tuple[list[Task], list[WovenFile]]:
    """The files to weave, and a fault for each edit file without an upstream module."""
    upstream = set(release.files())
    edits = edit_paths(checkout.edits)
    modules = {m for m in upstream if _may_hold_layers(m)} | set(edits)
    orphans = [
        _orphan(m, release.version)
        for m in sorted(modules - upstream)
        if _has_edits(m, edits[m], release.version)
    ]
    tasks = [
        _task(module, release, edits.get(module))
        for module in sorted(modules & upstream)
    ]
    return tasks, orphans


def _has_edits(module: str, path: Path, version: str) -> bool:
    """Whether any edit of a file is for this release; true if it does not load."""
    try:
        edits = load_edit_file(module, path).edits
    except BuildFailure:
        return True
    return any(edit.applies_to(version) for edit in edits)


def _may_hold_layers(module: str) -> bool:
    return module.startswith(_MODEL_FOLDERS) and module.endswith(".py")


def _task(module: str, release: Release, edit_file: Path | None) -> Task:
    path = release.root / module
    parts = [module.encode(), path.read_bytes()]  # the same in several releases
    if edit_file is not None:
        text = edit_file.read_bytes()
        parts += [text, language_digest()]
        if b"since(" in text or b"until(" in text:
            parts.append(release.version.encode())
    has_layers = _may_hold_layers(module)
    if has_layers:
        parts.append(weave_digest())
    return Task(
        module=module,
        version=release.version,
        upstream=path,
        edit_file=edit_file,
        has_layers=has_layers,
        key=digest_of(parts),
    )


def _orphan(module: str, version: str) -> WovenFile:
    origin = f"fork/edits/{module}"
    text = f"{origin} edits {module}, which does not exist in vLLM {version}."
    return WovenFile(module, None, (Fault(origin, module, "MissingModule", text),))


def _run(tasks: list[Task], jobs: int) -> list[WovenFile]:
    done: dict[str, WovenFile] = {}
    missing = []
    for task in tasks:
        cached = _read(task)
        if cached is None:
            missing.append(task)
        else:
            done[task.module] = cached
    for task, woven in zip(missing, _map(_weave_and_keep, missing, jobs), strict=True):
        done[task.module] = woven
    if missing:
        forget_unused()
    return [done[task.module] for task in tasks]


def _map(
    function: Callable[[Task], WovenFile], tasks: list[Task], jobs: int
) -> Iterable[WovenFile]:
    if jobs == 1 or len(tasks) < _POOL_FROM:
        return map(function, tasks)
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(function, tasks, chunksize=4))


def _weave_and_keep(task: Task) -> WovenFile:
    try:
        woven = weave_file(task)
    except Exception as error:
        error.add_note(f"while weaving {task.module} of vLLM {task.version}")
        raise
    if not woven.faults:  # a fault names the release
        keep(task.key, {"source": woven.source, "layers": woven.layers})
    return woven


def _read(task: Task) -> WovenFile | None:
    record = recall(task.key)
    if record is None:
        return None
    return WovenFile(task.module, record["source"], (), tuple(record["layers"]))


def weave_file(task: Task) -> WovenFile:
    """Weave one file: first its edits, then its decoder layers."""
    original = task.upstream.read_bytes().decode("utf-8")
    source = original
    if task.edit_file is not None:
        try:
            file = load_edit_file(task.module, task.edit_file)
        except BuildFailure as error:
            origin = f"fork/edits/{task.module}"
            fault = Fault(origin, task.module, "BrokenEditFile", f"{error}.")
            return WovenFile(task.module, None, (fault,))
        woven = weave(source, file, task.version)
        if woven.source is None:
            return WovenFile(task.module, None, woven.faults)
        source = woven.source
    layers: tuple[str, ...] = ()
    if task.has_layers:
        result = import_module("fork.weave.decoder_layers").weave_module(
            source, task.module
        )
        if result.problems:
            return WovenFile(task.module, None, _layer_faults(task, result.problems))
        source = source if result.source is None else result.source
        refused = (layer.name for layer in result.refused if layer.is_layer)
        layers = (*(layer.name for layer in result.layers), *refused)
    return WovenFile(task.module, None if source == original else source, (), layers)


def _layer_faults(task: Task, problems: tuple[str, ...]) -> tuple[Fault, ...]:
    return tuple(
        Fault(
            origin="fork/weave/decoder_layers.py",
            module=task.module,
            kind="DecoderLayer",
            sentence=f"fork/weave/decoder_layers.py: {task.module} in vLLM "
            f"{task.version}: {text.rstrip('.')}.",
        )
        for text in problems
    )
