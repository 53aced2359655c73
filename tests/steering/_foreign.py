# SPDX-License-Identifier: Apache-2.0
"""Files in other projects' formats, as their tools write them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter

from tests.v1.residual.sae import _layouts


def gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "controlvector",
    layer_count_type: GGUFValueType = GGUFValueType.UINT32,
) -> Path:
    """A GGUF file, for a Llama."""
    writer = GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "llama")
    count = "controlvector.layer_count"
    writer.add_key_value(count, len(tensors), layer_count_type)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def repeng(path: Path, directions: dict[int, np.ndarray]) -> Path:
    """A file like repeng's `export_gguf` writes: an unsigned layer count."""
    named = {f"direction.{layer}": vector for layer, vector in directions.items()}
    return gguf(path, named)


def cvector_generator(path: Path, measured: list[np.ndarray]) -> Path:
    """Like llama.cpp's tool: `measured[i]`, of block i, is direction i + 1."""
    named = {f"direction.{i + 1}": vector for i, vector in enumerate(measured)}
    return gguf(path, named, layer_count_type=GGUFValueType.INT32)


def saelens(folder: Path, decoder: np.ndarray, **config: Any) -> Path:
    """Write a folder like SAELens' `save_model`."""
    num_features, width = decoder.shape
    others = _layouts.chosen(
        _layouts.parts(0, width, num_features), "W_enc", "b_enc", "b_dec"
    )
    said = {"d_in": width, "d_sae": num_features, "architecture": "standard", **config}
    weights = others | {"W_dec": torch.from_numpy(decoder)}
    return _layouts.saelens(folder, weights, **said)
