# SPDX-License-Identifier: Apache-2.0
"""All cases, by how their blocks are built."""

from tests.parity.families import (
    absent,
    audio,
    backend,
    experts,
    hybrids,
    latent,
    llama,
    norms,
    on_cuda,
    parallel,
    pictures,
    renamed,
    repeated,
    rounded,
)

CASES = [
    *llama.CASES,
    *norms.CASES,
    *parallel.CASES,
    *experts.CASES,
    *latent.CASES,
    *hybrids.CASES,
    *renamed.CASES,
    *repeated.CASES,
    *pictures.CASES,
    *audio.CASES,
    *rounded.CASES,
    *backend.CASES,
    *on_cuda.CASES,
    *absent.CASES,
]
