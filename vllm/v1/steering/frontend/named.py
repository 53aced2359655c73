# SPDX-License-Identifier: Apache-2.0
"""The probes and SAEs of a server, which steering entries name."""

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from vllm.v1.residual.bounds import listed
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.named import NamedProbe, NamedSAE


class NamedFiles:
    """Probes and SAEs by name; safe to use from any thread.

    A probe's file was checked when it was registered; it is read again when an entry
    names it for the first time.
    """

    def __init__(
        self,
        described: Callable[[], Mapping[str, Any]],
        load_probe: Callable[[ModuleInfo], NamedProbe | None],
    ) -> None:
        """Start empty.

        Args:
            described: returns the configured modules, on first use.
            load_probe: reads a probe's file; None if it has changed since.

        """
        self._lock = threading.RLock()
        self._described = described
        self._load_probe = load_probe
        self._probes: dict[str, NamedProbe] = {}

    @cached_property
    def _infos(self) -> dict[str, ModuleInfo]:
        return {name: ModuleInfo(**info) for name, info in self._described().items()}

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """The modules by name; those of the configuration are read on first use."""
        with self._lock:
            return dict(sorted(self._infos.items()))

    def put(self, info: ModuleInfo) -> None:
        """Add a module that was registered."""
        with self._lock:
            self._infos[info.name] = info
            self._probes.pop(info.name, None)

    def remove(self, name: str) -> None:
        """Remove a module that was unregistered."""
        with self._lock:
            self._infos.pop(name, None)
            self._probes.pop(name, None)

    def probe(self, name: str, at: str) -> NamedProbe:
        """The probe of a name.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        with self._lock:
            info = self._info(
                "probe",
                name,
                "Register it with --readout-modules, or give its vector",
                at,
            )
            probe = self._probes.get(name) or self._load_probe(info)
            if probe is None:
                raise fail(
                    f"{at}: the file of {name!r} has changed since it was registered; "
                    "register it again",
                    at,
                    name,
                )
            self._probes[name] = probe
            return probe

    def sae(self, name: str, at: str) -> NamedSAE:
        """The SAE of a name.

        Raises:
            SteeringValidationError: there is none of this name.

        """
        info = self._info(
            "sae", name, "Name it with --sae NAME=PATH, or register it", at
        )
        return NamedSAE(
            info.fingerprint,
            info.width,
            info.size,
            info.tap,
            info.is_transcoder,
            info.writes,
            info.width_out,
        )

    def _info(self, kind: str, name: str, remedy: str, at: str) -> ModuleInfo:
        with self._lock:
            info = self._infos.get(name)
            if info is not None and info.kind == kind:
                return info
            having = [n for n, one in self._infos.items() if one.kind == kind]
        shown = {"probe": "probe", "sae": "SAE"}[kind]
        raise fail(
            f"{at}: no {shown} is named {name!r}; there are {listed(having)}. {remedy}",
            at,
            name,
        )
