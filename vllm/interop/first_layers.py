# SPDX-License-Identifier: Apache-2.0
"""Loading a model's first layers alone, where nothing that follows is read.

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
    """A model's config with its first `layers` layers, changed in place.

    Args:
        config: of a language model.
        layers: how many remain, at most as many as there are.

    Raises:
        ValueError: the model has fewer layers, or parts that are not a language model,
            whose layers cannot be told from its own by their names.

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
    """Loads weights as `auto` does, less those of layers that the config cuts off."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The weights of the checkpoint that belong to no later layer."""
        layers = model_config.hf_text_config.num_hidden_layers
        for name, weight in super().get_all_weights(model_config, model):
            found = _LAYER.search(name)
            if found is None or int(found[1]) < layers:
                yield name, weight
