# SPDX-License-Identifier: Apache-2.0
"""Feature operations as instructions: encoder rows are read, decoder rows written."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias

import torch

from vllm.model_executor.layers.residual.program import (
    Activation,
    Flag,
    Instruction,
    Kind,
)
from vllm.steering.sae import SparseAutoencoder
from vllm.v1.steering.operations import Operation

SAEs: TypeAlias = Callable[[str], SparseAutoencoder]
"""Returns the worker's SAE of a name, on the worker's device."""


def feature_instruction(one: Operation, saes: SAEs) -> Instruction:
    """Create the instruction that carries out a feature operation.

    For activation a of the feature, the decoder row is added `c0 + c1 a` times. If the
    SAE normalizes its input, the addition is scaled back by the same factor.
    """
    use = one.details.feature
    assert use is not None, "the operation has no feature"
    sae, place = saes(use.sae), slice(use.feature, use.feature + 1)
    read = sae.w_enc[:, place].T.float().contiguous()  # [1, d_in]
    write = sae.w_dec[place].float().contiguous()  # [1, d_out]
    c0, c1 = use.amounts
    flags = Flag.ONLY_ACTIVE if use.only_if_active else Flag.NONE
    if sae.input_norm == "constant_norm_rescale":
        root = sae.d_in**0.5
        flags, read, write = flags | Flag.COSINE, read * root, write / root
    elif sae.input_norm == "layer_norm":
        flags, read = flags | Flag.STANDARD, read - read.mean()
    threshold = torch.zeros(1, device=read.device)
    if sae.threshold is not None:  # Activations are not negative.
        threshold = sae.threshold[place].clamp(min=0.0)
    return Instruction(
        Kind.LOW_RANK,
        read,
        write=write,
        flags=flags,
        activation=Activation.JUMPRELU,
        bias=sae.b_enc[place].float().contiguous(),
        threshold=threshold.float().contiguous(),
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


def _alike(feature: tuple[str, Numbered]) -> tuple[str, int, int]:
    name, (_, one) = feature
    return name, one.gate, int(one.flags)


def _joined(alike: list[Instruction]) -> Instruction:
    if len(alike) == 1:
        return alike[0]

    def all_of(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in alike])

    names = ("read", "write", "bias", "threshold", "own_c0", "own_c1")
    joined: dict[str, Any] = {name: all_of(name) for name in names}
    return replace(alike[0], **joined)
