# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter on disk, and the base model with its weights merged."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.hf_reference import Reference

RANK = 8
ALPHA = 16
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def adapter(model: Path, folder: Path, seed: int = 5, scale: float = 0.1) -> Reference:
    """Write an adapter for `model`; returns the base with the adapter merged."""
    generator = torch.Generator().manual_seed(seed)
    merged, weights = Reference(model), {}
    with torch.no_grad():
        for name, module in merged.model.named_modules():
            if name.rpartition(".")[2] not in TARGETS:
                continue
            weight = module.weight
            down = torch.randn(RANK, weight.shape[1], generator=generator) * scale
            up = torch.randn(weight.shape[0], RANK, generator=generator) * scale
            weights[f"base_model.model.{name}.lora_A.weight"] = down
            weights[f"base_model.model.{name}.lora_B.weight"] = up
            weight += ALPHA / RANK * up @ down
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
