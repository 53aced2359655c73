# SPDX-License-Identifier: Apache-2.0
"""SAELens: a folder with `cfg.json` and `sae_weights.safetensors`.

Releases before 6 have all settings at the top level and other names for some of them;
later ones keep the place under `metadata`. Batch top-k and matryoshka SAEs are saved
as JumpReLU with a learned threshold; folders of a training run still hold it as
`topk_threshold`.
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
    take_optional,
)
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import transformer_lens, transformers
from vllm.v1.residual.sae.record import InputNorm, SAEPlace, Selection

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_SELECTIONS: dict[str, Selection] = {
    "standard": "threshold",
    "gated": "threshold",
    "jumprelu": "threshold",
    "batchtopk": "threshold",
    "matryoshka_batchtopk": "threshold",
    "topk": "topk",
    "abstopk": "abstopk",
    "transcoder": "threshold",
    "skip_transcoder": "threshold",
    "jumprelu_transcoder": "threshold",
    "jumprelu_skip_transcoder": "threshold",
}

_NEED_THRESHOLD = ("jumprelu", "batchtopk", "matryoshka")

_NORMS: dict[object, InputNorm] = {
    None: "none",
    False: "none",
    "none": "none",
    "constant_norm_rescale": "constant_norm_rescale",
    "layer_norm": "layer_norm",
}


def read_saelens_sae(folder: Path) -> RawSAE:
    """Read the SAE or transcoder in a folder that SAELens' `save_model` wrote."""
    config = settings(folder)
    path = folder / WEIGHTS
    tensors = read_tensors(path)
    architecture = _architecture(config, folder)
    _refuse_scaling(tensors, path)
    raw = RawSAE(
        w_enc=take(tensors, path, "W_enc"),
        w_dec=take(tensors, path, "W_dec"),
        b_enc=take_optional(tensors, path, "b_enc"),
        b_dec=take_optional(tensors, path, "b_dec"),
        selection=_SELECTIONS[architecture],
        threshold=_threshold(tensors, path, architecture),
        input_norm=_norm(config, folder),
        in_scale=_in_scale(config, folder),
        subtracts_b_dec="transcoder" not in architecture
        and bool(config.get("apply_b_dec_to_input", True)),
        by_decoder_norm=bool(config.get("rescale_acts_by_decoder_norm", False)),
        reads=_place(config, ""),
        model=str(config.get("model_name") or ""),
    )
    if raw.selection != "threshold":
        raw.k = int(_k(config, folder))
    if architecture == "gated":
        names = ("r_mag", "b_mag", "b_gate")
        r_mag, b_mag, b_gate = (take(tensors, path, name) for name in names)
        raw.gate = (r_mag, b_mag, b_gate)
    if "transcoder" in architecture:
        raw.writes = _place(config, "_out")
    if "skip" in architecture:
        raw.w_skip = take(tensors, path, "W_skip").T
    return raw


def settings(folder: Path) -> dict[str, Any]:
    """`cfg.json`, with the settings under `metadata` merged into the others."""
    config = read_settings(folder / CONFIG)
    found = dict(config)
    for name in ("meta", "metadata"):
        if isinstance(inner := config.get(name), dict):
            found |= {key: value for key, value in inner.items() if value is not None}
    return found


def _architecture(config: dict[str, Any], folder: Path) -> str:
    name = str(config.get("architecture") or "standard")
    activation = config.get("activation_fn") or config.get("activation_fn_str")
    if name == "standard" and activation == "topk":
        return "topk"
    if activation not in (None, "relu", "topk"):
        raise bad_file(folder, f"the activation {activation!r} is not relu or topk")
    if name not in _SELECTIONS:
        raise bad_file(
            folder,
            f"the architecture {name!r} is not one of {sorted(_SELECTIONS)}: its "
            "activations are not a function of one token's row",
        )
    return name


def _threshold(tensors: Tensors, path: Path, architecture: str) -> torch.Tensor | None:
    if not architecture.startswith(_NEED_THRESHOLD):
        return None
    if "threshold" not in tensors and "log_threshold" in tensors:
        return take(tensors, path, "log_threshold").float().exp()
    return take(tensors, path, "threshold", "topk_threshold")


def _refuse_scaling(tensors: Tensors, path: Path) -> None:
    scale = take_optional(tensors, path, "scaling_factor", "finetuning_scaling_factor")
    if scale is not None and not torch.equal(scale, torch.ones_like(scale)):
        raise bad_file(
            path,
            "has a scaling factor from fine-tuning, which SAELens no longer applies; "
            "multiply W_dec by it and remove it",
        )


def _norm(config: dict[str, Any], folder: Path) -> InputNorm:
    asked = config.get("normalize_activations")
    if asked in (True, "expected_average_only_in"):
        return "none"  # A scale, which `_in_scale` handles.
    if asked not in _NORMS:
        raise bad_file(
            folder,
            f"normalize_activations={asked!r} needs statistics that the file does "
            "not hold; fold them in SAELens and save the SAE again",
        )
    return _NORMS[asked]


def _in_scale(config: dict[str, Any], folder: Path) -> float:
    if config.get("normalize_activations") not in (True, "expected_average_only_in"):
        return 1.0
    factor = config.get("norm_scaling_factor")
    if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise bad_file(
            folder,
            "normalize_activations is 'expected_average_only_in', but the factor is "
            "not in cfg.json; add it as norm_scaling_factor, or fold it with "
            "SAELens' fold_activation_norm_scaling_factor and save the SAE again",
        )
    return float(factor)


def _k(config: dict[str, Any], folder: Path) -> int:
    given = config.get("activation_fn_kwargs") or {}
    k = config.get("k", given.get("k") if isinstance(given, dict) else None)
    if not isinstance(k, int | float) or k != int(k):
        raise bad_file(folder, f"k is {k!r}, but it is a number of features")
    return int(k)


def _place(config: dict[str, Any], suffix: str) -> SAEPlace:
    """The place, by Transformers' name if there is one.

    That name tells on which side of a norm it is, so if it is none of ours the other
    name, which does not, says nothing more.
    """
    if exact := config.get(f"hf_hook_name{suffix}"):
        return transformers(str(exact))
    name = config.get(f"hook_name{suffix}") or config.get(f"hook_point{suffix}")
    return transformer_lens(str(name or ""))
