# SPDX-License-Identifier: Apache-2.0
"""Llamas with dummy weights: of four sizes, and one for rows on a CPU."""

import json
import tempfile
from pathlib import Path

MODELS = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64},
    # The rows of the 8b, with half a percent of its work.
    "wide": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 32,
    },
}


def describe(name: str) -> str:
    """A description of a model, for reports."""
    size = MODELS[name]
    return (
        f"{name}: Llama, {size['num_hidden_layers']} layers of width "
        f"{size['hidden_size']}, bfloat16, random weights"
    )


def model_folder(name: str) -> str:
    """A folder with the configuration of a Llama, without weights."""
    size = MODELS[name]
    folder = Path(tempfile.gettempdir()) / f"decode-step-{name}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "intermediate_size": int(size["hidden_size"] * 3.5),
        "num_key_value_heads": 8 if size["hidden_size"] > 256 else 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
