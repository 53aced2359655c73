# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a sparse autoencoder, in float32: the reference for kernels.

Formulas: ReLU and tied conventions of SAELens (`sae_lens.saes`, 6.54); JumpReLU,
arXiv 2407.14435; top-k, arXiv 2406.04093; gated, arXiv 2404.16014, folded into a
threshold by `vllm.v1.residual.sae.fold`.
"""

import torch

from vllm.v1.residual.sae.record import SparseAutoencoder


def normalised(sae: SparseAutoencoder, rows: torch.Tensor) -> torch.Tensor:
    """Rows `[n, d_in]` normalised for the encoder, float32."""
    rows = rows.float()
    if sae.input_norm == "constant_norm_rescale":
        return rows * (sae.d_in**0.5 / rows.norm(dim=-1, keepdim=True))
    if sae.input_norm == "layer_norm":
        centred = rows - rows.mean(dim=-1, keepdim=True)
        return centred / (centred.std(dim=-1, keepdim=True) + 1e-5)
    return rows


def preactivations(sae: SparseAutoencoder, rows: torch.Tensor) -> torch.Tensor:
    """The pre-activations `[n, d_sae]`, float32, from which features are selected."""
    return normalised(sae, rows) @ sae.w_enc.float() + sae.b_enc


def select(sae: SparseAutoencoder, hidden: torch.Tensor) -> torch.Tensor:
    """Activations `[n, d_sae]`; 0 for inactive features.

    Args:
        sae: the SAE with its selection.
        hidden: the result of `preactivations`.

    """
    if sae.selection == "threshold":
        assert sae.threshold is not None
        return torch.where(hidden > sae.threshold, hidden, 0).relu()
    assert sae.k is not None
    if sae.selection == "groupmax":
        groups = hidden.relu().unflatten(-1, (sae.k, -1))
        best = groups.max(dim=-1, keepdim=True)
        kept = torch.zeros_like(groups).scatter_(-1, best.indices, best.values)
        return kept.flatten(-2)
    by = hidden.abs() if sae.selection == "abstopk" else hidden
    chosen = by.topk(sae.k, dim=-1).indices
    values = hidden.gather(-1, chosen)
    if sae.selection == "topk":
        values = values.relu()
    return torch.zeros_like(hidden).scatter_(-1, chosen, values)


def encode(sae: SparseAutoencoder, rows: torch.Tensor) -> torch.Tensor:
    """Activations of all features, `[n, d_sae]` float32.

    Args:
        sae: an SAE on the device of the rows.
        rows: `[n, d_in]`, of any floating dtype.

    """
    return select(sae, preactivations(sae, rows))


def decode(
    sae: SparseAutoencoder, activations: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The reconstruction `[n, d_out]`, float32, in units of the rows.

    Args:
        sae: an SAE on the device of the rows.
        activations: `[n, d_sae]`, the result of `encode`.
        rows: `[n, d_in]`; their norm or mean is restored in the reconstruction, and a
            skip transcoder adds a linear function of them.

    """
    out = activations @ sae.w_dec.float() + sae.b_dec
    rows = rows.float()
    # SAELens restores nothing for transcoders, whose widths may differ.
    if sae.is_transcoder:
        return out if sae.w_skip is None else out + rows @ sae.w_skip.float()
    if sae.input_norm == "constant_norm_rescale":
        return out * (rows.norm(dim=-1, keepdim=True) / sae.d_in**0.5)
    if sae.input_norm == "layer_norm":
        std = rows.std(dim=-1, keepdim=True)
        return out * std + rows.mean(dim=-1, keepdim=True)
    return out
