# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders of several projects, in one form.

`load_sae(path)` detects the layout of a file or folder and returns a
`SparseAutoencoder`, in which everything that can be folded into weights is folded: an
engine needs one matrix product, one threshold or top-k, and one decoder row.
"""

from vllm.v1.residual.sae.encode import decode, encode, preactivations
from vllm.v1.residual.sae.load import load_sae
from vllm.v1.residual.sae.record import SAEPlace, SparseAutoencoder

__all__ = [
    "SAEPlace",
    "SparseAutoencoder",
    "decode",
    "encode",
    "load_sae",
    "preactivations",
]
