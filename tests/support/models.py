# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, large enough that every branch has an effect."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples" / "demo_model" / "weights"
VOCABULARY = 1280
"""The vocabulary size of the demo model's tokenizer."""
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Two layers, 64 wide, two heads of 32: the options of a model that needs no others."""


def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Set weights that make every branch as large as the stream."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                start = weight.float()
                weight.copy_(start + scale * noise)
            elif weight.dim() == 1:
                weight.copy_(scale * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 2 * scale * (16 / weight.shape[-1]) ** 0.5)


def save(
    config: transformers.PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.2,
) -> Path:
    """A model of this configuration, as a checkpoint in `folder`."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed, scale)
    model.to(dtype).save_pretrained(folder)
    return folder


def llama(folder: Path, layers: int = 3, **options: Any) -> Path:
    """A Llama of a few layers, 64 wide, with the demo model's tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        **{"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
        | options,
    )
    return save_tokenizer(save(config, folder))


def save_tokenizer(folder: Path) -> Path:
    """Copy the demo model's tokenizer to a checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder
