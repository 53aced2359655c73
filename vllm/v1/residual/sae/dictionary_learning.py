# SPDX-License-Identifier: Apache-2.0
"""dictionary_learning: a folder with `config.json` and `ae.pt`.

`config.json` names the class under `trainer.dict_class`. Classes with linear layers
store matrices as `[out, in]`; the others as `[in, out]`. A threshold that training
never set is negative; ReLU is applied before it, so it has no effect.
"""

from collections.abc import Callable
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
    raw = RawSAE(w_enc=_encoder(tensors, path), w_dec=_decoder(tensors, path))
    _CLASSES[kind](raw, tensors, path)
    if kind == "AutoEncoderTopK":
        raw.selection, raw.k = "topk", _k(trainer, tensors, path)
    raw.reads = _place(trainer)
    raw.model = str(trainer.get("lm_name") or "")
    return raw


def _encoder(tensors: Tensors, path: Path) -> torch.Tensor:
    if "W_enc" in tensors:
        return take(tensors, path, "W_enc")
    return take(tensors, path, "encoder.weight").T


def _decoder(tensors: Tensors, path: Path) -> torch.Tensor:
    if "W_dec" in tensors:
        return take(tensors, path, "W_dec")
    return take(tensors, path, "decoder.weight").T


def _standard(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    raw.b_enc = take(tensors, path, "encoder.bias")
    raw.b_dec = take(tensors, path, "bias")
    raw.subtracts_b_dec = True


def _april(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    raw.b_enc = take(tensors, path, "encoder.bias")
    raw.b_dec = take(tensors, path, "decoder.bias")


def _gated(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    names = ("r_mag", "mag_bias", "gate_bias")
    r_mag, b_mag, b_gate = (take(tensors, path, name) for name in names)
    raw.gate = (r_mag, b_mag, b_gate)
    raw.b_dec = take(tensors, path, "decoder_bias")
    raw.subtracts_b_dec = True


def _jumprelu(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    raw.b_enc = take(tensors, path, "b_enc")
    raw.b_dec = take(tensors, path, "b_dec")
    raw.threshold = take(tensors, path, "threshold")


def _topk(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    raw.b_enc = take(tensors, path, "encoder.bias", "b_enc")
    raw.b_dec = take(tensors, path, "b_dec")
    raw.subtracts_b_dec = True


def _batch_topk(raw: RawSAE, tensors: Tensors, path: Path) -> None:
    _topk(raw, tensors, path)
    raw.threshold = take(tensors, path, "threshold")


_CLASSES: dict[str, Callable[[RawSAE, Tensors, Path], None]] = {
    "AutoEncoder": _standard,
    "AutoEncoderNew": _april,
    "GatedAutoEncoder": _gated,
    "JumpReluAutoEncoder": _jumprelu,
    "AutoEncoderTopK": _topk,
    "BatchTopKSAE": _batch_topk,
    "MatryoshkaBatchTopKSAE": _batch_topk,
}


def _k(trainer: dict[str, Any], tensors: Tensors, path: Path) -> int:
    k = trainer.get("k")
    return int(k) if isinstance(k, int) else int(take(tensors, path, "k"))


def _place(trainer: dict[str, Any]) -> SAEPlace:
    """The place by the submodule's name; the stream after the block by default."""
    layer = trainer.get("layer")
    name = str(trainer.get("submodule_name") or f"resid_post_layer_{layer}")
    stream = name.startswith("resid_post") and isinstance(layer, int)
    return SAEPlace(name, (int(layer), "post_block") if stream else None)  # type: ignore[arg-type]
