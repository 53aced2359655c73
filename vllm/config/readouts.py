# SPDX-License-Identifier: Apache-2.0
"""Configuration of readouts and of sparse autoencoders."""

from typing import Any

from pydantic import Field

from vllm.config.utils import config


@config
class ReadoutConfig:
    """Configuration of readouts."""

    enabled: bool = False
    """Whether requests can use readouts."""
    modules: dict[str, str] = Field(default_factory=dict)
    """Probes and translators: name -> file."""
    saes: dict[str, str] = Field(default_factory=dict)
    """Sparse autoencoders: name -> file or directory. Also used by interventions."""
    described: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Facts about the modules and SAEs that front ends need, by name."""
    refusals: dict[str, Any] = Field(default_factory=dict)
    """What the loaded model does not support, as in `Refusals`. Set by the engine
    core."""
    max_top_k: int = Field(default=64, gt=0)
    """Maximum number of tokens of a lens, or features of an SAE, per result."""
