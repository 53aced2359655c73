# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF control vectors; `spec/files/gguf.py` reads them and has the format."""

from pathlib import Path

import numpy as np

from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.files.gguf import ARCHITECTURE, HOOK, Writer, read_gguf
from vllm.v1.steering.spec.files.vectors import VectorSet

__all__ = ["Writer", "read_gguf", "write_gguf"]


def write_gguf(
    path: str | Path, vectors: VectorSet, writer: Writer = "repeng", hint: str = ""
) -> None:
    """Write a control vector that acts where the given vectors act.

    Args:
        path: the file to write.
        vectors: at `post_block`, or at `pre_attn` of layer L > 0, which is written as
            `post_block` of layer L - 1.
        writer: whose conventions to follow; only repeng's allow `direction.0`.
        hint: the model's type; by default that of the provenance.

    Raises:
        SteeringValidationError: a control vector cannot represent these vectors.

    """
    import gguf

    directions = _directions(vectors)
    if writer == "llama.cpp" and 0 in directions:
        raise fail(
            "layers: llama.cpp cannot add a vector to the output of block 0 and "
            "refuses direction.0; exclude this layer with --layers",
            "layers",
            0,
        )
    hint = hint or vectors.provenance.model_type or "unknown"
    out = gguf.GGUFWriter(path, ARCHITECTURE)
    out.add_string(f"{ARCHITECTURE}.model_hint", hint)
    count = out.add_int32 if writer == "llama.cpp" else out.add_uint32
    count(f"{ARCHITECTURE}.layer_count", len(directions))
    for layer, vector in sorted(directions.items()):
        out.add_tensor(f"direction.{layer}", vector.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _directions(vectors: VectorSet) -> dict[int, Vector]:
    """The vectors by the block to whose output they are added; sums at equal blocks."""
    found: dict[int, Vector] = {}
    for tap, vector in sorted(vectors.vectors.items()):
        block = _block(tap)
        found[block] = found[block] + vector if block in found else vector
    return found


def _block(tap: Tap) -> int:
    layer, hook = tap
    if hook == HOOK:
        return layer
    if hook == "pre_attn" and layer > 0:
        return layer - 1
    raise fail(
        f"vectors: a control vector is added to the output of a block; {hook} of layer "
        f"{layer} is another place. Extract it at post_block instead",
        "vectors",
        f"{hook}.{layer}",
    )
