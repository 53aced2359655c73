# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's sparsify: a folder named after a module, `cfg.json`, `sae.safetensors`.

ReLU is applied, then top-k or the largest of each of k groups. `encoder.weight` is a
linear layer's, `[d_sae, d_in]`; `W_dec` is `[d_sae, d_out]`. SAEs subtract b_dec from
the row that they encode, transcoders do not. `num_latents` 0 means `expansion_factor *
d_in`.
"""

from pathlib import Path
from typing import Any

from vllm.v1.residual.sae.files import (
    bad_file,
    read_settings,
    read_tensors,
    take,
    take_optional,
)
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import module_input, module_output
from vllm.v1.residual.sae.record import Selection

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"

_SELECTIONS: dict[str, Selection] = {"topk": "topk", "groupmax": "groupmax"}


def read_sparsify(folder: Path) -> RawSAE:
    """Read the SAE or transcoder in a folder that sparsify wrote."""
    config = read_settings(folder / CONFIG)
    path = folder / WEIGHTS
    tensors = read_tensors(path)
    transcodes = bool(config.get("transcode", False))
    name = folder.absolute().name
    skip = take_optional(tensors, path, "W_skip")
    return RawSAE(
        w_enc=take(tensors, path, "encoder.weight").T,
        w_dec=take(tensors, path, "W_dec"),
        b_enc=take_optional(tensors, path, "encoder.bias"),
        b_dec=take_optional(tensors, path, "b_dec"),
        selection=_selection(config, folder),
        k=_k(config, folder),
        subtracts_b_dec=not transcodes,
        w_skip=None if skip is None else skip.T,
        reads=module_input(name) if transcodes else module_output(name),
        writes=module_output(name) if transcodes else None,
        model=_model(folder.absolute().parent),
    )


def _selection(config: dict[str, Any], folder: Path) -> Selection:
    name = config.get("activation", "topk")
    if name not in _SELECTIONS or config.get("signed", False):
        raise bad_file(folder, f"the activation {name!r} is not {[*_SELECTIONS]}")
    return _SELECTIONS[name]


def _k(config: dict[str, Any], folder: Path) -> int:
    k = config.get("k")
    if not isinstance(k, int):
        raise bad_file(folder, f"k is {k!r}, but it is a number of features")
    return k


def _model(run: Path) -> str:
    config = run / "config.json"
    return str(read_settings(config).get("model") or "") if config.is_file() else ""
