# SPDX-License-Identifier: Apache-2.0
"""Folds conventions of a file into the weights.

Each rule keeps activations and reconstructions unchanged, for every row. Computations
are in float32; matrices are converted back to the file's dtype.
"""

from dataclasses import dataclass, field

import torch

from vllm.v1.residual.sae.record import (
    InputNorm,
    SAEPlace,
    Selection,
    SparseAutoencoder,
)


@dataclass(slots=True, kw_only=True)
class RawSAE:
    """An SAE in a file's own conventions, before it becomes a `SparseAutoencoder`."""

    w_enc: torch.Tensor  # [d_in, d_sae]
    w_dec: torch.Tensor  # [d_sae, d_out]
    b_enc: torch.Tensor | None = None  # [d_sae]
    b_dec: torch.Tensor | None = None  # [d_out]
    selection: Selection = "threshold"
    threshold: torch.Tensor | None = None  # [d_sae] or a scalar; None is 0
    k: int | None = None
    input_norm: InputNorm = "none"
    w_skip: torch.Tensor | None = None  # [d_in, d_out]
    subtracts_b_dec: bool = False
    """Whether the decoder bias is subtracted from the normalised row before
    encoding."""
    gate: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """`r_mag`, `b_mag`, `b_gate`, each `[d_sae]`, of a gated SAE."""
    in_scale: float = 1.0
    """Factor of rows before they are encoded."""
    out_scale: float | None = None
    """Divisor of the decoder's output; None for `in_scale`."""
    by_decoder_norm: bool = False
    """Whether pre-activations are multiplied by the norms of the decoder's rows, and
    activations divided by them before decoding."""
    reads: SAEPlace = field(default_factory=SAEPlace)
    writes: SAEPlace | None = None
    """Where it writes; None for `reads`."""
    model: str = ""


def folded(raw: RawSAE, name: str, layout: str) -> SparseAutoencoder:
    """Convert to the canonical form.

    Raises:
        SAEFileError: the shapes do not fit together.

    """
    d_sae, d_out = raw.w_enc.shape[-1], raw.w_dec.shape[-1]
    w_enc, w_dec = raw.w_enc.float(), raw.w_dec.float()
    b_enc = _or_zeros(raw.b_enc, d_sae)
    b_dec = _or_zeros(raw.b_dec, d_out)
    if raw.subtracts_b_dec:  # (x - b_dec) W = x W - b_dec W
        shift = b_dec @ w_enc
        b_enc = b_enc - shift
    else:
        shift = torch.zeros(())
    threshold = None
    if raw.selection == "threshold":
        threshold = torch.zeros(()) if raw.threshold is None else raw.threshold.float()
        threshold = threshold.expand(d_sae).clone()
    if raw.gate is not None:
        w_enc, b_enc, threshold = _gated(raw.gate, w_enc, shift)
    if raw.by_decoder_norm:  # relu and top-k are applied after the multiplication.
        norms = w_dec.norm(dim=-1)
        w_enc, b_enc, w_dec = w_enc * norms, b_enc * norms, w_dec / norms[:, None]
    out_scale = raw.in_scale if raw.out_scale is None else raw.out_scale
    return SparseAutoencoder(
        name=name,
        layout=layout,
        w_enc=(w_enc * raw.in_scale).to(raw.w_enc.dtype).contiguous(),
        b_enc=b_enc,
        w_dec=(w_dec / out_scale).to(raw.w_dec.dtype).contiguous(),
        b_dec=b_dec / out_scale,
        selection=raw.selection,
        threshold=threshold,
        k=raw.k,
        input_norm=raw.input_norm,
        w_skip=None if raw.w_skip is None else raw.w_skip.contiguous(),
        reads=raw.reads,
        writes=raw.reads if raw.writes is None else raw.writes,
        model=raw.model,
    )


def _gated(
    gate: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    w_enc: torch.Tensor,
    shift: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert a gate on the same product as the magnitude to a threshold.

    With m = exp(r_mag) > 0, `xW + b_gate > 0` is `h > b_mag - m * b_gate` for
    `h = m * xW + b_mag`, the pre-activation of the magnitude.
    """
    r_mag, b_mag, b_gate = (part.float() for part in gate)
    by = r_mag.exp()
    b_enc = b_mag - by * shift
    return w_enc * by, b_enc, b_mag - by * b_gate


def _or_zeros(bias: torch.Tensor | None, width: int) -> torch.Tensor:
    return torch.zeros(width) if bias is None else bias.float()
