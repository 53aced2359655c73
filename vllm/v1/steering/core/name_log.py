# SPDX-License-Identifier: Apache-2.0
"""The log of named modules, for several API server processes that share an engine.

Each front end resolves names by itself. The front ends must agree on which names exist,
so the engine core keeps every change since the start in one order. It does not read the
modules' content.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Changed(NamedTuple):
    """The last change of a name."""

    version: int
    module: bytes | None
    """The serialized module, which only front ends read; None if the name was
    removed."""


class NamesLog:
    """The modules that were registered or removed while the engine ran, by name."""

    def __init__(self) -> None:
        self.version = 0
        """The number of changes. A front end that has seen this version knows every
        name."""
        self._latest: dict[str, Changed] = {}

    def change(self, known: int, name: str, module: bytes | None) -> bool:
        """Change a name if `known` is the latest version; whether it was changed.

        Args:
            known: the version against which the change was checked.
            name: the module's name.
            module: the serialized module; None to remove the name.

        """
        if known != self.version:
            return False
        self.version += 1
        self._latest[name] = Changed(self.version, module)
        return True

    def since(self, known: int) -> dict[str, bytes | None]:
        """Each name that was changed after a version, with its present module."""
        return {
            name: one.module
            for name, one in self._latest.items()
            if one.version > known
        }


def module_names(core: "EngineCore", kind: str, known: int) -> list[Any]:
    """The latest version, and by name what was changed after `known`.

    Args:
        core: the engine core.
        kind: of the modules; each has names of its own.
        known: a version that the caller has seen.

    """
    names = _log_of(core, kind)
    return [names.version, names.since(known)]


def change_module_name(
    core: "EngineCore", kind: str, known: int, name: str, module: bytes | None
) -> bool:
    """Register or remove a name; false where `known` is not the latest version."""
    return _log_of(core, kind).change(known, name, module)


def _log_of(core: "EngineCore", kind: str) -> NamesLog:
    scheduler: Any = core.scheduler
    found: NamesLog = scheduler.residual.steering.names[kind]
    return found
