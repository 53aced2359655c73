# SPDX-License-Identifier: Apache-2.0
"""Llama Scope and its R1-distilled series, by OpenMOSS: JumpReLU.

The first has `hyperparams.json` and `checkpoints/final.safetensors`, the second
`config.json` and `sae_weights.safetensors`; both store linear layers, so matrices are
`[out, in]`. Rows are scaled so that their norm is sqrt(d_in) in the mean over the data
that an SAE was trained on. The first series has one threshold for all features, in
units of rows before they are scaled; the second has the logarithm of one per feature.
"""

from pathlib import Path
from typing import Any

import torch

from vllm.v1.residual.sae.files import (
    Tensors,
    bad_file,
    read_settings,
    read_tensors,
    take,
)
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import transformer_lens

FIRST = "hyperparams.json"
FIRST_WEIGHTS = Path("checkpoints") / "final.safetensors"
SECOND, SECOND_WEIGHTS = "config.json", "sae_weights.safetensors"
NORMS = "dataset_average_activation_norm"


def read_llama_scope(folder: Path) -> RawSAE:
    """Read the SAE in a folder of Llama Scope."""
    first = (folder / FIRST).is_file()
    config = read_settings(folder / (FIRST if first else SECOND))
    path = folder / (FIRST_WEIGHTS if first else SECOND_WEIGHTS)
    tensors = read_tensors(path)
    w_enc = take(tensors, path, "encoder.weight").T
    in_scale, out_scale = _scales(config, tensors, folder, w_enc.shape[0])
    reads = transformer_lens(str(config.get("hook_point_in") or ""))
    writes = transformer_lens(str(config.get("hook_point_out") or reads.name))
    return RawSAE(
        w_enc=w_enc,
        w_dec=take(tensors, path, "decoder.weight").T,
        b_enc=take(tensors, path, "encoder.bias"),
        b_dec=take(tensors, path, "decoder.bias"),
        threshold=_threshold(config, tensors, path, in_scale),
        in_scale=in_scale,
        out_scale=out_scale,
        reads=reads,
        writes=writes,
        model=str(config.get("model_name") or ""),
    )


def _scales(
    config: dict[str, Any], tensors: Tensors, folder: Path, width: int
) -> tuple[float, float]:
    """The factor of rows before encoding, and the divisor of the output."""
    if config.get("norm_activation") == "inference":
        return 1.0, 1.0  # Set if the scale is part of the weights.
    norms = config.get(NORMS)
    if not isinstance(norms, dict):
        # Newer files have them among the tensors, one per hook point.
        prefix = f"{NORMS}."
        by_place = {
            name.removeprefix(prefix): float(tensor)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        reads, writes = config.get("hook_point_in"), config.get("hook_point_out")
        norms = {"in": by_place.get(str(reads)), "out": by_place.get(str(writes))}
    given = norms.get("in")
    if not isinstance(given, int | float) or given <= 0:
        raise bad_file(
            folder, f"{NORMS}.in is {given!r}, but it is the mean norm of its rows"
        )
    out = norms.get("out") or given
    return width**0.5 / float(given), width**0.5 / float(out)


def _threshold(
    config: dict[str, Any], tensors: Tensors, path: Path, in_scale: float
) -> torch.Tensor:
    if "log_jumprelu_threshold" in tensors:
        return take(tensors, path, "log_jumprelu_threshold").float().exp()
    given = config.get("jump_relu_threshold")
    if not isinstance(given, int | float):
        raise bad_file(path, f"jump_relu_threshold is {given!r}, but it is a number")
    return torch.tensor(float(given) * in_scale)
