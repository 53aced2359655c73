# SPDX-License-Identifier: Apache-2.0
"""The readout modules of a worker, loaded before memory is profiled."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.v1.readouts.modules import (
    Module,
    ProbeModule,
    load_module,
)
from vllm.v1.readouts.worker.sae import on_device
from vllm.v1.residual.sae import SparseAutoencoder

if TYPE_CHECKING:
    from vllm.config.readouts import ReadoutConfig

Loaded: TypeAlias = dict[str, Module]


class WorkerModules:
    """Probes, translators and SAEs on the device, by name. Engine thread only.

    Starts with the modules and SAEs of the configuration.
    """

    def __init__(
        self, config: "ReadoutConfig", device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device, self._dtype = device, dtype
        self._modules: Loaded = {}
        self._fingerprints: dict[str, str] = {}
        for name, path in {**config.modules, **config.saes}.items():
            self.load(name, path, None, config.described[name]["fingerprint"])

    def load(
        self, name: str, path: str, tap: tuple[int, str] | None, fingerprint: str
    ) -> None:
        """Load a module and replace one of the same name.

        Raises:
            ReadoutValidationError: the file is invalid.

        """
        self._modules[name] = self._placed(load_module(name, path, tap))
        self._fingerprints[name] = fingerprint

    def unload(self, name: str) -> None:
        """Drop a module, if it is loaded."""
        self._modules.pop(name, None)
        self._fingerprints.pop(name, None)

    def has(self, name: str, fingerprint: str) -> bool:
        """Whether a module is loaded, and not another one under its name."""
        return self._fingerprints.get(name) == fingerprint

    def sae(self, name: str) -> SparseAutoencoder:
        """An SAE by name; its matrices have the model's dtype."""
        found = self._modules[name]
        assert isinstance(found, SparseAutoencoder), f"{name!r} is not an SAE"
        return found

    def __getitem__(self, name: str) -> Module:
        """A module by name: probes in float32, others in the model's dtype."""
        return self._modules[name]

    def _placed(self, module: Module) -> Module:
        device, dtype = self._device, self._dtype
        if isinstance(module, SparseAutoencoder):
            return on_device(module, device, dtype)
        if isinstance(module, ProbeModule):
            threshold = module.threshold
            return replace(
                module,
                vectors=module.vectors.to(device),
                bias=module.bias.to(device),
                threshold=None if threshold is None else threshold.to(device),
            )
        return replace(
            module,
            weights={k: w.to(device, dtype) for k, w in module.weights.items()},
            biases={k: b.to(device, dtype) for k, b in module.biases.items()},
        )
