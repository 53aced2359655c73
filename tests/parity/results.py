# SPDX-License-Identifier: Apache-2.0
"""The results of parity in `results.json`, by architecture, dtype and device.

Runs add to the file: an entry's variants are merged by name, and everything else is
kept. `supported_models.md` is generated from it.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import Case
from tests.parity.comparison import Compared
from tests.parity.inside import INSIDE
from tests.parity.recipe import ADDED, HOOKS

RESULTS = Path(__file__).with_name("results.json")
Entry = dict[str, Any]
HookPoints = Mapping[int, Iterable[str]]
POINTS = (*HOOKS, *ADDED, *INSIDE)


def key_of(architecture: str, dtype: str, device: str) -> str:
    """The key of an entry."""
    return f"{architecture} {dtype} {device}"


@contextmanager
def changing() -> Iterator[dict[str, Entry]]:
    """All entries of the file, which no other process changes meanwhile."""
    with RESULTS.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries: dict[str, Entry] = json.loads(RESULTS.read_text() or "{}")
        yield entries
        RESULTS.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def outcome(case: Case, compared: Compared, points: HookPoints) -> Entry:
    """The record of a compared case."""
    offered = {hook for hooks in points.values() for hook in hooks}
    proven = offered - compared.unproven.keys()
    return {
        "proven": not compared.problems,
        "max_relative_error": float(f"{compared.row_error:.2g}"),
        "intervention_error": float(f"{compared.change_error:.2g}"),
        "hook_points": [hook for hook in POINTS if hook in proven],
        **({"unproven": compared.unproven} if compared.unproven else {}),
        "tolerance": float(f"{compared.tolerance:.2g}"),
        **({"notes": case.notes} if case.notes else {}),
        **({"reason": compared.problems[0]} if compared.problems else {}),
    }


def failure(reason: str) -> Entry:
    """The record of a case that could not be compared."""
    return {"proven": False, "reason": reason}


def record(found: Mapping[Case, Entry], device: str) -> None:
    """Merge outcomes of cases, the results of `outcome` or `failure`, into the file."""
    with changing() as entries:
        for case, result in found.items():
            key = key_of(case.architecture, case.dtype, device)
            entry = entries.get(key, {})
            cases = entry.get("cases", {}) | {case.variant: result | _machine(device)}
            entries[key] = _entry(case, device, cases) | {
                name: entry[name] for name in PARALLEL if name in entry
            }


def note(architecture: str, fact: str) -> None:
    """Note one of `PARALLEL` of an architecture, in float32 on a CPU."""
    with changing() as entries:
        entries[key_of(architecture, "float32", "cpu")][fact] = True


PARALLEL = ("tensor_parallel", "pipeline_parallel")
"""Facts that other suites add to an entry."""


def _entry(case: Case, device: str, cases: dict[str, Entry]) -> Entry:
    proven = {name: c for name, c in cases.items() if c["proven"]}
    hooks = {hook for c in proven.values() for hook in c["hook_points"]}
    entry: Entry = {
        "architecture": case.architecture,
        "dtype": case.dtype,
        "device": device,
        "variants": sorted(proven),
        "hook_points": [hook for hook in POINTS if hook in hooks],
        "date": datetime.now(UTC).date().isoformat(),
        "cases": dict(sorted(cases.items())),
    }
    for error in ("max_relative_error", "intervention_error"):
        entry[error] = max((c[error] for c in proven.values()), default=None)
    if any(c.get("at_most") for c in proven.values()):
        entry["at_most"] = True
    return entry


def _machine(device: str) -> Entry:
    """The GPU that this process sees, if cases ran on one."""
    if device != "cuda" or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}
