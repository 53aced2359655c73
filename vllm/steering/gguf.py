# SPDX-License-Identifier: Apache-2.0
"""GGUF control vectors as written and read by repeng and llama.cpp.

A file has a tensor `direction.L` for each layer. The two count layers as follows:

- Applied: both add `direction.L` to the output of block L, counted from 0, which is
  our `post_block` of layer L. llama.cpp rejects `direction.0`.
- Measured: repeng computes `direction.L` from the output of block L, where it also
  applies it (for the last block, from the output after the final norm). llama.cpp's
  `cvector-generator` computes it from the output of block L - 1, so it is applied one
  block after the one where it was measured.

The writer is recognised by the type of `controlvector.layer_count`: unsigned for
repeng, signed for llama.cpp.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.provenance import Provenance

ARCHITECTURE = "controlvector"
HOOK = "post_block"

Writer = Literal["repeng", "llama.cpp"]
Layers = Literal["applied", "measured"]


def read_gguf(path: str | Path, layers: Layers = "applied") -> VectorSet:
    """Read a control vector file.

    Args:
        path: the file.
        layers: whether to put `direction.L` where it is applied or where it was
            measured; they differ only for files of llama.cpp's `cvector-generator`.

    Raises:
        SteeringValidationError: the file is not a control vector.

    """
    reader = _open(Path(path))
    kind = _text(reader, "general.architecture")
    if kind != ARCHITECTURE:
        raise fail(
            f"path: {str(path)!r} is a GGUF file of the kind {kind!r}, not a control "
            f"vector ({ARCHITECTURE})",
            "path",
            str(path),
        )
    writer = writer_of(reader)
    shift = 1 if layers == "measured" and writer == "llama.cpp" else 0
    vectors = {
        (_layer(tensor.name, shift, path), HOOK): _values(tensor, path)
        for tensor in reader.tensors
        if tensor.name.startswith("direction.")
    }
    origin = f"{Path(path).name}, a control vector in the form of {writer}"
    hint = _text(reader, f"{ARCHITECTURE}.model_hint")
    said = Provenance(model_type=hint, origin=f"{origin}, layers as {layers}")
    return vector_set(vectors, said, str(path))


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


def writer_of(reader: Any) -> Writer:
    """The program that wrote a file, by the type of its layer count."""
    import gguf

    counted = reader.get_field(f"{ARCHITECTURE}.layer_count")
    signed = counted is not None and counted.types == [gguf.GGUFValueType.INT32]
    return "llama.cpp" if signed else "repeng"


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise fail(
            "path: reading and writing GGUF needs the package gguf: pip install gguf",
            "path",
            str(path),
        ) from None
    if not path.is_file():
        raise fail(f"path: there is no file {str(path)!r}", "path", str(path))
    try:
        return gguf.GGUFReader(path)
    # The reader raises any of these for an invalid file.
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise fail(
            f"path: {path.name!r} is not a GGUF file: {error}", "path", str(path)
        ) from None


def _text(reader: Any, name: str) -> str:
    field = reader.get_field(name)
    value = None if field is None else field.contents()
    return value if isinstance(value, str) else ""


def _layer(name: str, shift: int, path: str | Path) -> int:
    number = name.removeprefix("direction.")
    if not (number.isascii() and number.isdigit()) or int(number) < shift:
        raise fail(
            f"path: the tensor {name!r} of {str(path)!r} is not named direction.LAYER "
            f"with a layer of at least {shift}",
            "path",
            name,
        )
    return int(number) - shift


def _values(tensor: Any, path: str | Path) -> Vector:
    if tensor.data.dtype.kind != "f":
        raise fail(
            f"path: the tensor {tensor.name!r} of {str(path)!r} is quantised "
            f"({tensor.tensor_type.name}); only float types can be read",
            "path",
            tensor.name,
        )
    values: Vector = np.array(tensor.data, dtype=np.float32)  # a copy, not the mmap
    return values


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
