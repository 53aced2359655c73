# SPDX-License-Identifier: Apache-2.0
"""Goodfire's two SAEs: one file, named such as `Llama-3.1-8B-Instruct-SAE-l19.pth`.

The file has linear layers `[out, in]` and uses ReLU. It reads the stream after the
block whose 0-based number is in the name. b_dec is not subtracted from the row.
"""

import re
from pathlib import Path

from vllm.v1.residual.sae.files import read_tensors, take
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import numbered, residual_after

_SUFFIXES = (".pt", ".pth")


def is_goodfire(path: Path) -> bool:
    """Whether a file's name is that of a Goodfire SAE."""
    named = re.search(r"-SAE-l\d+$", path.stem) is not None
    return path.is_file() and path.suffix in _SUFFIXES and named


def read_goodfire(path: Path) -> RawSAE:
    """Read the SAE in a Goodfire file."""
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
