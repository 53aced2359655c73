# SPDX-License-Identifier: Apache-2.0
"""Models for both sides: the demo model and tiny ones with random weights."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 256
"""Token ids below this exist in every model here."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder, and how to run it."""

    name: str
    folder: Path
    dtype: str


def demo_model() -> Model:
    """The committed demo model."""
    weights = ROOT / "examples" / "demo_model" / "weights"
    return Model("demo", weights, "bfloat16")


def tiny_models(folder: Path) -> list[Model]:
    """Three random models, one for each way that decoder layers add to the stream.

    Llama passes on the pair (branch, residual), Gemma 3 norms a branch before adding
    it, GPT-2 adds explicitly. Written below `folder`.
    """
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    wide = {"hidden_size": 128, "intermediate_size": 192, **shape, **heads}
    configs = {
        "llama": transformers.LlamaConfig(**wide),
        "gemma3": transformers.Gemma3TextConfig(**wide, sliding_window=64),
        "gpt2": transformers.GPT2Config(
            n_embd=128,
            n_head=4,
            n_layer=3,
            n_positions=256,
            vocab_size=VOCABULARY,
            bos_token_id=1,
            eos_token_id=2,
        ),
    }
    transformers.utils.logging.disable_progress_bar()
    return [_save(name, config, folder) for name, config in configs.items()]


def _save(name: str, config: transformers.PretrainedConfig, folder: Path) -> Model:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Initial weights are so small that all logits would be nearly equal.
            parameter.mul_(3)
    model.save_pretrained(folder / name)
    return Model(name, folder / name, "float32")


def random_prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of random tokens, equal on every call."""
    draw = random.Random(0)
    return [
        [draw.randrange(8, VOCABULARY) for _ in range(draw.randint(shortest, longest))]
        for _ in range(count)
    ]


def random_llama(
    folder: Path, layers: int, width: int, vocab_size: int = 1280
) -> Model:
    """A Llama with random weights and the demo model's tokenizer; written once."""
    name = f"llama-{layers}x{width}"
    if vocab_size != 1280:
        name += f"x{vocab_size}"
    model = Model(name, folder / name, "float32")
    if not (model.folder / "model.safetensors").exists():
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )
        made.save_pretrained(model.folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model().folder / name, model.folder)
    return model
