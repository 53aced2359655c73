# SPDX-License-Identifier: Apache-2.0
"""Feature operations as instructions: encoder rows are read, decoder rows written."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from vllm.model_executor.layers.residual.program import (
    Activation,
    Flag,
    Instruction,
    Kind,
)
from vllm.v1.residual.sae import SparseAutoencoder
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.plan import Operation

SAEs: TypeAlias = Callable[[str], SparseAutoencoder]
"""Returns the worker's SAE of a name, on the worker's device."""


def feature_instruction(one: Operation, saes: SAEs) -> Instruction:
    """Create the instruction that carries out a feature operation where it writes.

    For activation a of the feature, the decoder row is added `c0 + c1 a` times. If an
    SAE normalizes its input, the addition is scaled back by the same factor. For a
    transcoder the activation has been read at another hook point.
    """
    use = one.details.feature
    assert use is not None, "the operation has no feature"
    if use.reads is None:
        return _encoded(use, saes(use.sae))
    sae = saes(use.sae)
    c0, c1 = use.amounts
    made = Instruction(Kind.LINEAR, _decoder_row(use, sae), c0=c0, c1=c1)
    if not use.carries:
        return made
    flags = Flag.CARRIED
    if use.only_if_active:
        flags |= Flag.ONLY_ACTIVE
    bias: torch.Tensor | None = _bias(use, sae)
    threshold = _threshold(use, sae)
    if sae.selection != "threshold":  # What is stored is selected, and has its bias.
        bias, threshold = None, torch.full_like(threshold, -math.inf)
    return replace(made, flags=flags, bias=bias, threshold=threshold)


def carried_instruction(one: Operation, saes: SAEs) -> Instruction | None:
    """Create the instruction that stores what a transcoder reads.

    That is the product, without the bias, or if the transcoder selects features the
    activation, in the instruction's doses. Returns None if the operation does not need
    the activation, or is no feature of a transcoder.
    """
    use = one.details.feature
    if use is None or not use.carries:
        return None
    made = _encoded(use, saes(use.sae))
    kept = made.flags & (Flag.COSINE | Flag.STANDARD) | Flag.VALUE
    if made.activation == Activation.SELECT:  # Nothing is written.
        return replace(made, flags=kept, write=made.read, own_c0=None, own_c1=None)
    return Instruction(Kind.PROBE, made.read, flags=kept)


def _decoder_row(use: FeatureUse, sae: SparseAutoencoder) -> torch.Tensor:
    row = sae.w_dec[use.feature : use.feature + 1]  # [1, d_out]
    return row.float().contiguous()


def _bias(use: FeatureUse, sae: SparseAutoencoder) -> torch.Tensor:
    return sae.b_enc[use.feature : use.feature + 1].float().contiguous()  # [1]


def _threshold(use: FeatureUse, sae: SparseAutoencoder) -> torch.Tensor:
    if sae.threshold is None:
        return torch.zeros(1, device=sae.w_enc.device)
    # Activations are not negative.
    found = sae.threshold[use.feature : use.feature + 1].clamp(min=0.0)
    return found.float().contiguous()  # [1]


_RIVALS: "WeakKeyDictionary[SparseAutoencoder, torch.Tensor]" = WeakKeyDictionary()
"""The encoders whose features are selected, `[d_sae, d_in]`, as programs read them."""


def _rows(sae: SparseAutoencoder, place: slice) -> torch.Tensor:
    """Encoder rows `[n, d_in]` of features, for the product with a row as it is."""
    rows = sae.w_enc[:, place].T.float().contiguous()
    if sae.input_norm == "constant_norm_rescale":
        return rows * sae.d_in**0.5
    if sae.input_norm == "layer_norm":
        return rows - rows.mean(dim=-1, keepdim=True)
    return rows


def _selecting(feature: int, sae: SparseAutoencoder) -> dict[str, Any]:
    """The fields of an instruction that finds whether a feature is among the largest.

    All rivals are encoded for each token, as an activation depends on all of them.
    """
    assert sae.k is not None, "only a threshold has no k"
    if sae not in _RIVALS:
        _RIVALS[sae] = _rows(sae, slice(None))
    most, count = sae.k, sae.d_sae
    if sae.selection == "groupmax":
        most, count = 1, sae.d_sae // sae.k
    first = feature // count * count
    place = slice(first, first + count)
    return {
        "activation": Activation.SELECT,
        "low": -math.inf if sae.selection == "abstopk" else 0.0,
        "c2": float(most),
        "c3": float(count),
        "mask": _RIVALS[sae][place],
        "threshold": sae.b_enc[place].float().contiguous(),
    }


def _encoded(use: FeatureUse, sae: SparseAutoencoder) -> Instruction:
    place = slice(use.feature, use.feature + 1)
    read = _rows(sae, place)  # [1, d_in]
    write = _decoder_row(use, sae)
    c0, c1 = use.amounts
    flags = Flag.ONLY_ACTIVE if use.only_if_active else Flag.NONE
    if sae.input_norm == "constant_norm_rescale":
        flags, write = flags | Flag.COSINE, write / sae.d_in**0.5
    elif sae.input_norm == "layer_norm":
        flags = flags | Flag.STANDARD
    threshold = _threshold(use, sae)
    active: dict[str, Any] = {
        "activation": Activation.JUMPRELU,
        "threshold": threshold,
    }
    if sae.selection != "threshold" and use.needs_activation:
        active = _selecting(use.feature, sae)
    return Instruction(
        Kind.LOW_RANK,
        read,
        write=write,
        flags=flags,
        **active,
        bias=_bias(use, sae),
        own_c0=torch.full_like(threshold, c0),
        own_c1=torch.full_like(threshold, c1),
    )


Numbered: TypeAlias = tuple[int, Instruction]


def together(features: Iterable[tuple[str, Numbered]]) -> list[Numbered]:
    """Join features of one SAE to one instruction, because all read the same stream.

    Args:
        features: in order of application, the SAE, and the number and instruction of
            each.

    """
    kept = sorted(features, key=_alike)
    made: list[Numbered] = []
    for _, group in groupby(kept, key=_alike):
        alike = [numbered for _, numbered in group]
        made.append((alike[0][0], _joined([one for _, one in alike])))
    return sorted(made, key=lambda numbered: numbered[0])


def _alike(feature: tuple[str, Numbered]) -> tuple[str, int, int, int, int]:
    name, (number, one) = feature
    alone = -1 if one.kind == Kind.LOW_RANK else number  # Of a transcoder.
    rivals = 0 if one.mask is None else one.mask.data_ptr()
    return name, one.gate, int(one.flags), alone, rivals


def _joined(alike: list[Instruction]) -> Instruction:
    if len(alike) == 1:
        return alike[0]

    def all_of(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in alike])

    names = ["read", "write", "bias", "own_c0", "own_c1"]
    if alike[0].mask is None:  # Rivals are shared.
        names.append("threshold")
    joined: dict[str, Any] = {name: all_of(name) for name in names}
    return replace(alike[0], **joined)
