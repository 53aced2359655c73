# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders on the device, for readouts and interventions."""

from dataclasses import replace

import torch

from vllm.v1.readouts.worker.jobs import Arrays
from vllm.v1.residual.sae import SparseAutoencoder
from vllm.v1.residual.sae.encode import normalised, select


def on_device(
    sae: SparseAutoencoder, device: torch.device, dtype: torch.dtype
) -> SparseAutoencoder:
    """Copy an SAE to the device, with its matrices in the dtype of the rows.

    Biases and thresholds stay float32, the dtype of the pre-activations.
    """
    return replace(
        sae,
        w_enc=sae.w_enc.to(device, dtype),
        w_dec=sae.w_dec.to(device, dtype),
        b_enc=sae.b_enc.to(device),
        b_dec=sae.b_dec.to(device),
        threshold=None if sae.threshold is None else sae.threshold.to(device),
        w_skip=None if sae.w_skip is None else sae.w_skip.to(device, dtype),
    )


def hidden(sae: SparseAutoencoder, rows: torch.Tensor) -> torch.Tensor:
    """Pre-activations `[R, d_sae]` in float32; inputs are in the weights' dtype."""
    if sae.input_norm != "none":
        rows = normalised(sae, rows)
    rows = rows.to(sae.w_enc.dtype)
    if rows.is_cuda and rows.dtype != torch.float32:
        # Rounding to the weights' dtype would create ties between features.
        products = torch.mm(rows, sae.w_enc, out_dtype=torch.float32)
    else:
        products = (rows @ sae.w_enc).float()
    return products + sae.b_enc


def sae_values(
    sae: SparseAutoencoder, rows: torch.Tensor, top_k: int, features: tuple[int, ...]
) -> Arrays:
    """The `top_k` features with the largest activations, or those in `features`.

    Args:
        sae: on the device of `rows`.
        rows: `[R, hidden_size]`.
        top_k: features per row; ignored if `features` are given.
        features: indices of features, or empty.

    Returns:
        `features` int32 `[R, top_k]`, -1 where fewer are active, and `activations`
        float32 of the same shape; or only `activations` `[R, len(features)]`. In a
        top-k SAE a feature is active if it is among the k largest of all features.

    """
    found = hidden(sae, rows)
    if features:
        wanted = torch.tensor(features, device=rows.device)
        return {"activations": select(sae, found)[:, wanted]}
    if sae.selection in ("topk", "abstopk"):
        assert sae.k is not None
        top = _largest(found, min(top_k, sae.k), sae.selection == "abstopk")
    else:
        top = _largest(select(sae, found), top_k, False)
    values, indices = top
    if sae.selection == "topk":
        values = values.relu()
    indices = indices.to(torch.int32).masked_fill(values == 0, -1)
    lacking = top_k - values.shape[1]
    if lacking:
        values = torch.nn.functional.pad(values, (0, lacking))
        indices = torch.nn.functional.pad(indices, (0, lacking), value=-1)
    return {"features": indices, "activations": values}


def _largest(
    values: torch.Tensor, count: int, absolute: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    by = values.abs() if absolute else values
    indices = by.topk(count, dim=-1).indices
    return values.gather(-1, indices), indices
