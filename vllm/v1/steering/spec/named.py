# SPDX-License-Identifier: Apache-2.0
"""The probes and sparse autoencoders of a server, which steering entries name."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.residual.bounds import listed
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector


@dataclass(frozen=True, slots=True, eq=False)
class NamedProbe:
    """A probe whose rows conditions may use."""

    vectors: Vector  # [k, hidden_size]
    bias: Vector  # [k]
    activation: str
    cosine: bool
    tap: Tap | None
    """The `(layer, hook)` for which it was made, if it is known."""


class NamedFiles:
    """Probes and SAEs by name; safe to use from any thread.

    A probe's file was checked when it was registered; it is read again when an entry
    names it for the first time. Only the workers hold an SAE's weights.
    """

    def __init__(
        self,
        known: KnownModules,
        load_probe: Callable[[ModuleInfo], NamedProbe | None],
    ) -> None:
        """Start without having read a file.

        Args:
            known: the modules.
            load_probe: reads a probe's file; None if it has changed since.

        """
        self._lock = threading.RLock()
        self._known = known
        self._load_probe = load_probe
        self._probes: dict[str, tuple[ModuleInfo, NamedProbe]] = {}

    def probe(self, name: str, at: str) -> NamedProbe:
        """The probe of a name.

        Args:
            name: the probe's name.
            at: the parameter's name in messages.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        remedy = "Register it with --readout-modules, or give its vector"
        with self._lock:
            info = self._info("probe", name, remedy, at)
            was, probe = self._probes.get(name, (None, None))
            if was is not info:
                probe = self._load_probe(info)
            if probe is None:
                raise fail(
                    f"{at}: the file of {name!r} has changed since it was registered; "
                    "register it again",
                    at,
                    name,
                )
            self._probes[name] = info, probe
            return probe

    def sae(self, name: str, at: str) -> ModuleInfo:
        """The SAE of a name; arguments and errors are those of `probe`."""
        remedy = "Name it with --sae NAME=PATH, or register it"
        return self._info("sae", name, remedy, at)

    def _info(self, kind: str, name: str, remedy: str, at: str) -> ModuleInfo:
        info = self._known.all.get(name)
        if info is not None and info.kind == kind:
            return info
        having = [name for name, one in self._known.all.items() if one.kind == kind]
        shown = {"probe": "probe", "sae": "SAE"}[kind]
        raise fail(
            f"{at}: no {shown} is named {name!r}; there are {listed(having)}. {remedy}",
            at,
            name,
        )


NONE_NAMED = NamedFiles(KnownModules({}), lambda info: None)
