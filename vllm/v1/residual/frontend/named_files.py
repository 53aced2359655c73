# SPDX-License-Identifier: Apache-2.0
"""The probes and SAEs of a server, as entries of steering name them."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.readouts.modules import ProbeModule, load_module
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.steering.frontend.named import NamedFiles
from vllm.v1.steering.spec.named import NamedProbe


def named_files(described: Callable[[], Mapping[str, Any]]) -> NamedFiles:
    """The files of modules; `described` returns the configured ones on first use."""
    return NamedFiles(described, _load_probe)


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
