# SPDX-License-Identifier: Apache-2.0
"""Named vectors where several API server processes share an engine: the owner's part.

Each front end resolves names by itself. What they must agree on is which names there
are, so the engine core keeps what was changed since the start, in one order. It does
not look into it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Changed(NamedTuple):
    """The last change of a name."""

    version: int
    module: bytes | None
    """As front ends write it; None where the name was removed."""


class NamesLog:
    """What was registered and removed while the engine ran, by name."""

    def __init__(self) -> None:
        self.version = 0
        """Counts changes. A front end that knows the last one knows every name."""
        self._latest: dict[str, Changed] = {}

    def change(self, known: int, name: str, module: bytes | None) -> bool:
        """Change a name, unless it rests on another version than the last.

        Args:
            known: the version that the change was checked against.
            name: of the module.
            module: as a front end writes it; None to remove it.

        """
        if known != self.version:
            return False
        self.version += 1
        self._latest[name] = Changed(self.version, module)
        return True

    def since(self, known: int) -> dict[str, bytes | None]:
        """What has become of each name that was changed after a version."""
        return {
            name: one.module
            for name, one in self._latest.items()
            if one.version > known
        }


def steering_names(core: "EngineCore", known: int) -> list[Any]:
    """The last version, and what was changed after `known`, by name."""
    names: NamesLog = core.scheduler.steering.names  # type: ignore[attr-defined]
    return [names.version, names.since(known)]


def change_steering_name(
    core: "EngineCore", known: int, name: str, module: bytes | None
) -> bool:
    """Register or remove a name; false where `known` is not the last version."""
    names: NamesLog = core.scheduler.steering.names  # type: ignore[attr-defined]
    return names.change(known, name, module)
