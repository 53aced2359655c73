# SPDX-License-Identifier: Apache-2.0
"""Goodfire's two SAEs: one file, named such as `Llama-3.1-8B-Instruct-SAE-l19.pth`.

Linear layers `[out, in]`, ReLU, of the stream that leaves the block which the name
counts from 0. b_dec is not subtracted from the row.
"""

import re
from pathlib import Path

from vllm.steering.sae.files import read_tensors, take
from vllm.steering.sae.fold import RawSAE
from vllm.steering.sae.places import numbered, residual_after

_SUFFIXES = (".pt", ".pth")


def is_goodfire(path: Path) -> bool:
    """Whether a file is named as theirs are."""
    named = re.search(r"-SAE-l\d+$", path.stem) is not None
    return path.is_file() and path.suffix in _SUFFIXES and named


def read_goodfire(path: Path) -> RawSAE:
    """The SAE in a file of Goodfire."""
    tensors = read_tensors(path)
    layer = numbered(r"-l(\d+)$", path.stem)
    return RawSAE(
        w_enc=take(tensors, path, "encoder_linear.weight").T,
        w_dec=take(tensors, path, "decoder_linear.weight").T,
        b_enc=take(tensors, path, "encoder_linear.bias"),
        b_dec=take(tensors, path, "decoder_linear.bias"),
        reads=residual_after(layer, f"stream after layer {layer}"),
        model=f"meta-llama/{path.stem.partition('-SAE-')[0]}",
    )
