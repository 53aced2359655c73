# SPDX-License-Identifier: Apache-2.0
"""Configuration of readouts and of sparse autoencoders."""

from typing import Any

from pydantic import Field

from vllm.config.utils import config


@config
class ReadoutConfig:
    """Configuration of readouts."""

    enabled: bool = False
    """Whether requests can read out."""
    modules: dict[str, str] = Field(default_factory=dict)
    """Named probes and translators: name -> file."""
    saes: dict[str, str] = Field(default_factory=dict)
    """Named sparse autoencoders: name -> file or folder. Interventions use them too."""
    described: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What front ends must know of the modules and SAEs, by name."""
    max_top_k: int = Field(default=64, gt=0)
    """The most tokens of a lens, or features of an SAE, that a result may hold."""
