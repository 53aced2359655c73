# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantised weights, and the equivalent dequantised models."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.hf_reference import Reference

GROUP = 32
"""Number of inputs that share a scale, if a row has several scales."""
Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Converts a weight `[out, in]` to its tensors in a checkpoint and its dequantised
value."""


def _four_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Integers from -8 to 7 with a scale per group; eight of them in an int32."""
    out, width = weight.shape
    groups = weight.view(out, width // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    whole = (groups / scale).round().clamp(-8, 7)
    nibbles = (whole + 8).to(torch.int64).view(out, width // 8, 8)
    packed = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    tensors = {
        "weight_packed": signed.to(torch.int32),
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor([out, width]),
    }
    return tensors, (whole * scale).view(out, width)


def _eight_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Integers from -127 to 127 with a scale per row."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    whole = (weight / scale).round()
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """A form of quantised weights."""

    form: str
    """The scheme's name in the checkpoint."""
    quantise: Quantise
    dtype: str
    """The engine's dtype; its kernel for four bits does not support float32."""
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    """How the engine quantizes the input of a linear layer; None: it does not."""


SCHEMES = {
    "w4a16": Scheme(
        "pack-quantized",
        _four_bits,
        "float16",
        {"num_bits": 4, "strategy": "group", "group_size": GROUP},
        None,
    ),
    "w8a8": Scheme(
        "int-quantized",
        _eight_bits,
        "float32",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ),
}


def quantised(model: Path, folder: Path, scheme: Scheme) -> Reference:
    """Write `model` to `folder` with quantised linear layers.

    Returns the equivalent model: weights are dequantised, and inputs of layers are
    rounded like in the engine.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    meant, tensors = Reference(model), {}
    with torch.no_grad():
        for name, weight in meant.model.state_dict().items():
            tensors[name] = weight
        for name, module in meant.model.model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            weight = tensors.pop(f"model.{name}.weight")
            stored, value = scheme.quantise(weight)
            tensors |= {f"model.{name}.{key}": part for key, part in stored.items()}
            module.weight.copy_(value)
            if scheme.inputs is not None:
                module.register_forward_pre_hook(_round_input)
    save_file(
        {k: v.clone().contiguous() for k, v in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    _describe(folder / "config.json", scheme)
    return meant


def _round_input(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Round to 8 bits, with a scale per token."""
    (rows,) = args
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return ((rows / scale).round() * scale,)


def _describe(path: Path, scheme: Scheme) -> None:
    shared = {"type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": shared | scheme.weights,
        "input_activations": scheme.inputs and shared | scheme.inputs,
    }
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": scheme.form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    path.write_text(json.dumps(config))
