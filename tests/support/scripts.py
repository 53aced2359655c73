# SPDX-License-Identifier: Apache-2.0
"""Loads example scripts, of which several folders may have equal names."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

Run = Callable[..., str]
"""The fixture `run_script`: runs code, and returns what it prints."""


def load(folder: Path, name: str) -> ModuleType:
    """The script `name` of a folder, loaded once."""
    full = f"{folder.name}_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]
