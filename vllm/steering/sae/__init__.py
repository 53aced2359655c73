# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders, whoever trained them, in one form.

`load_sae(path)` finds out which of the known layouts a file or folder has and returns
a `SparseAutoencoder`, in which everything that can be folded into weights is folded:
an engine needs one matrix product, one threshold or top-k, and one decoder row.
"""

from vllm.steering.sae.encode import decode, encode, preactivations
from vllm.steering.sae.load import load_sae
from vllm.steering.sae.record import SAEPlace, SparseAutoencoder

__all__ = [
    "SAEPlace",
    "SparseAutoencoder",
    "decode",
    "encode",
    "load_sae",
    "preactivations",
]
