# SPDX-License-Identifier: Apache-2.0
"""Qwen Scope: `layerN.sae.pt`, top-k SAEs of the stream after a block.

The file has W_enc `[d_sae, d_in]` and W_dec `[d_in, d_sae]`; k is the number after
`L0_` in the repository's name, which must be the name of a parent folder. The decoder
bias is not subtracted from the encoded row.
"""

import re
from pathlib import Path

from vllm.v1.residual.sae.files import bad_file, read_tensors, take
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import numbered, residual_after

_FILE = r"layer(\d+)\.sae\.pt$"


def is_qwen_scope(path: Path) -> bool:
    """Whether a file's name is that of a Qwen Scope SAE."""
    return path.is_file() and re.fullmatch(_FILE, path.name) is not None


def read_qwen_scope(path: Path) -> RawSAE:
    """Read the SAE in a file of Qwen Scope.

    Raises:
        SAEFileError: no parent folder's name has the number of active features per row.

    """
    tensors = read_tensors(path)
    whole = str(path.absolute())
    active = numbered(r"L0_(\d+)", whole)
    if active is None:
        raise bad_file(
            path,
            "the number of active features is in the repository's name only; keep the "
            "file in a folder with the repository's name, such as "
            "SAE-Res-Qwen3-1.7B-Base-W32K-L0_50",
        )
    layer = numbered(_FILE, path.name)
    model = re.search(r"SAE-Res-(.+?)-W\d+K", whole)
    return RawSAE(
        w_enc=take(tensors, path, "W_enc").T,
        w_dec=take(tensors, path, "W_dec").T,
        b_enc=take(tensors, path, "b_enc"),
        b_dec=take(tensors, path, "b_dec"),
        selection="topk",
        k=active,
        reads=residual_after(layer, f"stream after layer {layer}"),
        model="" if model is None else f"Qwen/{model[1]}",
    )
