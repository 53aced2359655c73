# SPDX-License-Identifier: Apache-2.0
"""Loads only the first layers of a model, if nothing reads the later ones.

The activations up to a layer do not depend on the layers after it, so an engine that
only serves them needs neither their weights nor their time. The tokens that such an
engine generates mean nothing.
"""

import dataclasses
import re
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

LOAD_FORMAT = "first_layers"
"""The `load_format` of an engine whose config names fewer layers than its weights."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def engine_options(layers: int) -> dict[str, Any]:
    """Arguments of `LLM` that load the first `layers` layers of a model."""
    return {
        "load_format": LOAD_FORMAT,
        "hf_overrides": partial(shortened, layers=layers),
    }


def shortened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Limit a model's config to its first `layers` layers, in place.

    Args:
        config: a language model's config.
        layers: the number of layers that remain.

    Raises:
        ValueError: the model has fewer layers, or parts besides the language model, so
            that layer names do not identify the language model's layers.

    """
    if type(config) is PretrainedConfig:
        return config  # vLLM looks there for another model type before it loads one
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} has parts beside the language model; start it "
            "without stop_at_layer, with all layers"
        )
    count = config.num_hidden_layers
    if not 1 <= layers <= count:
        raise ValueError(
            f"stop_at_layer={layers}: the model has {count} layers; give 1 to {count}"
        )
    config.num_hidden_layers = layers
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, value[:layers])  # layer_types, for example
    return config


class FirstLayersLoader(DefaultModelLoader):
    """Loads weights like `auto`, without those of layers that the config omits."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the checkpoint's weights, without those of later layers."""
        layers = model_config.hf_text_config.num_hidden_layers
        for name, weight in super().get_all_weights(model_config, model):
            found = _LAYER.search(name)
            if found is None or int(found[1]) < layers:
                yield name, weight
