# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for image libraries that a model's file imports, and a CPU lacks.

Upstream's requirements on a CPU omit torchvision, so it cannot import the files of text
models that share theirs with a multimodal model. No text model computes with it: a
module of empty classes is sufficient for the import.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class _StandIn(ModuleType):
    """A module with an empty class of any name."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(names: tuple[str, ...]) -> None:
    """Make these modules importable, packages first, if they are not installed.

    Other libraries check for them at import: call this after vllm and transformers were
    imported.
    """
    for name in [name for name in names if not _is_there(name)]:
        sys.modules[name] = _StandIn(name)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, sys.modules[name])


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is not
        return False
