# SPDX-License-Identifier: Apache-2.0
"""Libraries that a model's file imports for pictures, and that a CPU does without.

Upstream's requirements on a CPU leave out torchvision, so it cannot import the files
of text models that share theirs with a model of pictures. Nothing that such a text
model computes is in there: a module of empty classes is enough to import the file.
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
    """Has a class of any name, which can do nothing."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(names: tuple[str, ...]) -> None:
    """Make these modules importable, packages first, where they are not installed.

    Others ask whether they are there when they are imported, and adapt: call this
    after vllm and transformers were.
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
