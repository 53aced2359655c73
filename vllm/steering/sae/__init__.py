# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders of several projects; see `vllm.v1.residual.sae`."""

from vllm.v1.residual.sae import (
    SAEPlace,
    SparseAutoencoder,
    decode,
    encode,
    load_sae,
    preactivations,
)

__all__ = [
    "SAEPlace",
    "SparseAutoencoder",
    "decode",
    "encode",
    "load_sae",
    "preactivations",
]
