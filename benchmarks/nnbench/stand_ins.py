# SPDX-License-Identifier: Apache-2.0
"""The backend without nnbench: the names of its package that a backend imports."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent / "clearbox"


def modules(token: int) -> dict[str, ModuleType]:
    """By name: the modules of the package `isb`; every target is this token."""
    found = {
        name: ModuleType(name)
        for name in (
            "isb",
            "isb.backends",
            "isb.backends.base",
            "isb.jobs",
            "isb.jobs.worker",
            "isb.methodologies",
            "isb.methodologies.registry",
            "isb.methodologies.steering",
            "isb.runs",
        )
    }
    cells: dict[str, Callable[..., Any]] = {}

    def cell(name: str, family: str, backend: str) -> Callable[..., Any]:
        assert (family, backend) == ("llama", "clearbox")
        return lambda function: cells.setdefault(name, function)

    contents: dict[str, dict[str, Any]] = {
        "backends.base": {"Backend": object},
        "jobs.worker": {"merge_requirements": lambda wanted, given: wanted | given}
        | {"options": dict},
        "methodologies.registry": {"cell": cell, "Unsupported": RuntimeError}
        | {"cells": cells},
        "methodologies.steering": {"_resolve_token": lambda _tokenizer, _text: token},
        "runs": {"EngineConfig": SimpleNamespace, "RunConfig": SimpleNamespace},
    }
    for name, names in contents.items():
        vars(found[f"isb.{name}"]).update(names)
    return found


def loaded(name: str) -> ModuleType:
    """A module of the backend; `modules` must be in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(
        f"nnbench_{name}", FOLDER / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
