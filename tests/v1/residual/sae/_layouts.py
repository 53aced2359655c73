# SPDX-License-Identifier: Apache-2.0
"""Writes SAEs in every layout, according to the layouts' descriptions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

D_IN, D_SAE, K = 6, 20, 4

Parts = dict[str, torch.Tensor]


def parts(seed: int = 0, d_in: int = D_IN, d_sae: int = D_SAE) -> Parts:
    """The parts of all architectures; W_enc is `[d_in, d_sae]`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "W_enc": draw(d_in, d_sae),
        "W_dec": draw(d_sae, d_in),
        "b_enc": draw(d_sae) * 0.3,
        "b_dec": draw(d_in) * 0.5,
        "threshold": draw(d_sae).abs(),
        "r_mag": draw(d_sae) * 0.2,
        "b_mag": draw(d_sae) * 0.3,
        "b_gate": draw(d_sae) * 0.3,
        "W_skip": draw(d_in, d_in),
    }


def rows(count: int = 9, d_in: int = D_IN) -> torch.Tensor:
    return torch.randn(count, d_in, generator=torch.Generator().manual_seed(99))


def linear(p: Parts, encoder: str = "encoder", decoder: str = "decoder") -> Parts:
    """The matrices of linear layers, which are `[out, in]`."""
    return {
        f"{encoder}.weight": p["W_enc"].T.contiguous(),
        f"{decoder}.weight": p["W_dec"].T.contiguous(),
    }


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _save(path: Path, tensors: Parts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def saelens(folder: Path, tensors: Parts, **config: Any) -> Path:
    _json(folder / "cfg.json", {"d_in": D_IN, "d_sae": D_SAE, **config})
    _save(folder / "sae_weights.safetensors", tensors)
    return folder


def chosen(p: Parts, *names: str) -> Parts:
    return {name: p[name] for name in names}


def gemma_scope_1(folder: Path, p: Parts) -> Path:
    folder.mkdir(parents=True)
    names = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")
    arrays = {name: p[name].numpy() for name in names}
    np.savez(folder / "params.npz", **arrays)
    return folder


def gemma_scope_2(folder: Path, p: Parts, skip: bool = False, **config: Any) -> Path:
    tensors = chosen(p, "b_enc", "b_dec", "threshold")
    tensors |= {"w_enc": p["W_enc"], "w_dec": p["W_dec"]}
    if skip:
        tensors["affine_skip_connection"] = p["W_skip"]
    _save(folder / "params.safetensors", tensors)
    if config:
        _json(folder / "config.json", {"architecture": "jump_relu", **config})
    return folder


def llama_scope(folder: Path, p: Parts, threshold: float, norm: float) -> Path:
    tensors = linear(p) | {"encoder.bias": p["b_enc"], "decoder.bias": p["b_dec"]}
    _save(folder / "checkpoints" / "final.safetensors", tensors)
    place = "blocks.7.hook_resid_post"
    config = {
        "d_model": D_IN,
        "d_sae": D_SAE,
        "jump_relu_threshold": threshold,
        "dataset_average_activation_norm": {"in": norm, "out": norm},
        "hook_point_in": place,
        "hook_point_out": place,
    }
    _json(folder / "hyperparams.json", config)
    return folder


def llama_scope_r1(folder: Path, p: Parts, norm: float) -> Path:
    tensors = linear(p) | {"encoder.bias": p["b_enc"], "decoder.bias": p["b_dec"]}
    tensors["log_jumprelu_threshold"] = p["threshold"].log()
    place = "blocks.3.hook_resid_post"
    tensors[f"dataset_average_activation_norm.{place}"] = torch.tensor(norm)
    _save(folder / "sae_weights.safetensors", tensors)
    config = {"d_model": D_IN, "hook_point_in": place, "hook_point_out": place}
    _json(folder / "config.json", config)
    return folder


def qwen_scope(folder: Path, p: Parts, layer: int = 5) -> Path:
    folder.mkdir(parents=True)
    tensors = {
        "W_enc": p["W_enc"].T.contiguous(),
        "W_dec": p["W_dec"].T.contiguous(),
        **chosen(p, "b_enc", "b_dec"),
    }
    torch.save(tensors, folder / f"layer{layer}.sae.pt")
    return folder / f"layer{layer}.sae.pt"


def sparsify(folder: Path, p: Parts, skip: bool = False, **config: Any) -> Path:
    tensors = {"encoder.weight": p["W_enc"].T, "encoder.bias": p["b_enc"]}
    tensors |= chosen(p, "W_dec", "b_dec")
    if skip:
        tensors["W_skip"] = p["W_skip"]
    _save(folder / "sae.safetensors", tensors)
    said = {"d_in": D_IN, "k": K, "num_latents": 0, "expansion_factor": 4, **config}
    _json(folder / "cfg.json", said)
    return folder


def dictionary_learning(
    folder: Path, tensors: Parts, dict_class: str, **trainer: Any
) -> Path:
    said = {"dict_class": dict_class, "layer": 2, "lm_name": "org/model", **trainer}
    _json(folder / "config.json", {"trainer": said, "buffer": {"ctx_len": 8}})
    torch.save(tensors, folder / "ae.pt")
    return folder


def goodfire(folder: Path, p: Parts, name: str = "Llama-3.1-8B-Instruct-SAE-l19.pth"):
    tensors = linear(p, "encoder_linear", "decoder_linear")
    tensors |= {"encoder_linear.bias": p["b_enc"], "decoder_linear.bias": p["b_dec"]}
    folder.mkdir(parents=True)
    torch.save(tensors, folder / name)
    return folder / name
