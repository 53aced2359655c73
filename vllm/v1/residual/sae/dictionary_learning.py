# SPDX-License-Identifier: Apache-2.0
"""dictionary_learning: a folder with `config.json` and `ae.pt`.

`config.json` names the class under `trainer.dict_class`. Classes with linear layers
store matrices as `[out, in]`; the others as `[in, out]`. A threshold that training
never set is negative; ReLU is applied before it, so it has no effect.
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
from vllm.v1.residual.sae.record import SAEPlace

CONFIG, WEIGHTS = "config.json", "ae.pt"
_ADDING = ("AutoEncoderNew", "JumpReluAutoEncoder")
"""Classes that encode rows as they are, without the decoder's bias subtracted."""
_WITH_THRESHOLD = ("JumpReluAutoEncoder", "BatchTopKSAE", "MatryoshkaBatchTopKSAE")
_OTHERS = ("AutoEncoder", "AutoEncoderTopK", "GatedAutoEncoder")
_CLASSES = {*_ADDING, *_WITH_THRESHOLD, *_OTHERS}


def read_dictionary_learning(folder: Path) -> RawSAE:
    """Read the dictionary in a folder of a training run."""
    trainer = read_settings(folder / CONFIG).get("trainer")
    if not isinstance(trainer, dict):
        raise bad_file(folder, f"{CONFIG} has no settings of a trainer")
    path = folder / WEIGHTS
    kind = str(trainer.get("dict_class"))
    if kind not in _CLASSES:
        raise bad_file(folder, f"dict_class {kind!r} is not one of {sorted(_CLASSES)}")
    tensors = read_tensors(path)
    raw = RawSAE(
        w_enc=_matrix(tensors, path, "W_enc", "encoder.weight"),
        w_dec=_matrix(tensors, path, "W_dec", "decoder.weight"),
        b_dec=take(tensors, path, "b_dec", "decoder_bias", "decoder.bias", "bias"),
        subtracts_b_dec=kind not in _ADDING,
        reads=_place(trainer),
        model=str(trainer.get("lm_name") or ""),
    )
    if kind == "GatedAutoEncoder":
        names = ("r_mag", "mag_bias", "gate_bias")
        r_mag, b_mag, b_gate = (take(tensors, path, name) for name in names)
        raw.gate = (r_mag, b_mag, b_gate)
    else:
        raw.b_enc = take(tensors, path, "encoder.bias", "b_enc")
    if kind in _WITH_THRESHOLD:
        raw.threshold = take(tensors, path, "threshold")
    if kind == "AutoEncoderTopK":
        raw.selection, raw.k = "topk", _k(trainer, tensors, path)
    return raw


def _matrix(tensors: Tensors, path: Path, name: str, linear: str) -> torch.Tensor:
    """A matrix `[in, out]`, or that of a linear layer transposed."""
    found = take(tensors, path, name, linear)
    return found if name in tensors else found.T


def _k(trainer: dict[str, Any], tensors: Tensors, path: Path) -> int:
    k = trainer.get("k")
    return int(k) if isinstance(k, int) else int(take(tensors, path, "k"))


def _place(trainer: dict[str, Any]) -> SAEPlace:
    """The place by the submodule's name; the stream after the block by default."""
    layer = trainer.get("layer")
    name = str(trainer.get("submodule_name") or f"resid_post_layer_{layer}")
    stream = name.startswith("resid_post") and isinstance(layer, int)
    return SAEPlace(name, (int(layer), "post_block") if stream else None)  # type: ignore[arg-type]
