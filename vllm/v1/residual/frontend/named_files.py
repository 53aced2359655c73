# SPDX-License-Identifier: Apache-2.0
"""The probes and SAEs of a server, as entries of steering name them."""

from vllm.v1.readouts.modules import ProbeModule, load_module
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.steering.spec.named import NamedFiles, NamedProbe


def named_files(known: KnownModules) -> NamedFiles:
    """The files of these modules."""
    return NamedFiles(known, _load_probe)


def _load_probe(info: ModuleInfo) -> NamedProbe | None:
    module = load_module(info.name, info.path)
    if not isinstance(module, ProbeModule) or module.fingerprint() != info.fingerprint:
        return None
    return NamedProbe(
        module.vectors.numpy(),
        module.bias.numpy(),
        module.activation,
        module.cosine,
        info.tap,
    )
