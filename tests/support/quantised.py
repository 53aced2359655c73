# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantised weights, and the equivalent dequantised models."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.hf_reference import Reference

GROUP = 32
"""Number of inputs that share a scale, if a row has several scales."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose weights are in the nibbles of an int32 of AWQ, lowest first."""
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Converts a weight `[out, in]` to its tensors in a checkpoint and its dequantised
value."""


def _packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 15 in int32s of eight, along the last dimension."""
    by_eight = nibbles.to(torch.int64).unflatten(-1, (-1, 8))
    packed = (by_eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _symmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers from 0 to 15 of which 8 is zero, scales `[out, groups]`, values."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    whole = (groups / scale).round().clamp(-8, 7)
    return (whole + 8).flatten(1), scale.squeeze(-1), (whole * scale).flatten(1)


def _compressed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    nibbles, scale, value = _symmetric(weight)
    tensors = {
        "weight_packed": _packed(nibbles),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, value


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Its zeros are stored less one."""
    nibbles, scale, value = _symmetric(weight)
    tensors = {
        "qweight": _packed(nibbles).T,
        "qzeros": _packed(torch.full_like(scale.T, 7)),
        "scales": scale.T.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, value


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Integers from 0 to 15 with a scale and a zero per group."""
    groups = weight.unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    whole = ((groups / scale).round() + zero).clamp(0, 15)

    def stored(values: torch.Tensor) -> torch.Tensor:
        return _packed(values.T.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(1))

    tensors = {
        "qweight": stored(whole.flatten(1)),
        "qzeros": stored(zero.squeeze(-1)),
        "scales": scale.squeeze(-1).T.half(),
    }
    return tensors, ((whole - zero) * scale).flatten(1)


def _eight_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Integers from -127 to 127 with a scale per row."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    whole = (weight / scale).round()
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def _floats(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Floats of 8 bits with a scale per row."""
    scale = weight.abs().amax(-1, keepdim=True) / torch.finfo(FP8).max
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _to_integers(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


def _to_floats(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / torch.finfo(FP8).max
    return (rows / scale).to(FP8).float() * scale


def _compressed_tensors(
    form: str,
    kind: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    shared = {"type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": shared | weights,
        "input_activations": inputs and shared | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_BY_ROW = {"num_bits": 8, "strategy": "channel"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A form of quantised weights."""

    quantise: Quantise
    config: Mapping[str, Any]
    """The `quantization_config` of the checkpoint."""
    dtype: str = "float16"
    """The engine's dtype; kernels for four bits do not support float32."""
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None
    """How the engine quantizes the input of a linear layer, with a scale per token;
    None: it does not."""


SCHEMES = {
    "w4a16": Scheme(
        _compressed,
        _compressed_tensors(
            "pack-quantized",
            "int",
            {"num_bits": 4, "strategy": "group", "group_size": GROUP},
        ),
    ),
    "w8a8": Scheme(
        _eight_bits,
        _compressed_tensors("int-quantized", "int", _BY_ROW, _PER_TOKEN),
        "float32",
        _to_integers,
    ),
    "fp8": Scheme(
        _floats,
        _compressed_tensors("float-quantized", "float", _BY_ROW, _PER_TOKEN),
        "float32",
        _to_floats,
    ),
    "awq": Scheme(
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "gptq": Scheme(
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
        },
    ),
}


def multiply_out(model: nn.Module, scheme: Scheme) -> Tensors:
    """Give the layers of `model` the dequantised weights, and round their inputs.

    Returns the tensors of the checkpoint with quantised weights.
    """
    tensors = dict(model.state_dict())
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or name == "lm_head":
                continue
            stored, value = scheme.quantise(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{key}": part for key, part in stored.items()}
            module.weight.copy_(value)
            if (rounded := scheme.rounded) is not None:
                module.register_forward_pre_hook(
                    lambda _, args, rounded=rounded: (rounded(args[0]),)
                )
    return tensors


def quantised(model: Path, folder: Path, scheme: Scheme) -> Reference:
    """Write `model` to `folder` with quantised linear layers.

    Returns the equivalent model: weights are dequantised, and inputs of layers are
    rounded like in the engine.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    meant = Reference(model)
    tensors = multiply_out(meant.model, scheme)
    save_file(
        {k: v.clone().contiguous() for k, v in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = scheme.config
    path.write_text(json.dumps(config))
    return meant
