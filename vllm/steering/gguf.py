# SPDX-License-Identifier: Apache-2.0
"""GGUF control vectors, as repeng and llama.cpp write and read them.

A file has a tensor `direction.L` for each layer. How both count layers:

- Applied: repeng and llama.cpp both add `direction.L` to the output of block L, counted
  from 0: our `post_block` of layer L. llama.cpp refuses `direction.0`.
- Measured: repeng computes `direction.L` from the output of block L, where it applies
  it (for the last block, from that output after the final norm). llama.cpp's
  `cvector-generator` computes it from the output of block L - 1 and so applies it one
  block later than it was measured.

The two writers differ in the type of `controlvector.layer_count`: repeng writes an
unsigned number, llama.cpp a signed one. So a file says which of them wrote it.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Tap, Vector
from vllm.v1.steering.spec.provenance import Provenance

ARCHITECTURE = "controlvector"
HOOK = "post_block"

Writer = Literal["repeng", "llama.cpp"]
Layers = Literal["applied", "measured"]


def read_gguf(path: str | Path, layers: Layers = "applied") -> VectorSet:
    """The vectors of a control vector file.

    Args:
        path: the file.
        layers: put `direction.L` where it is applied, or where it was measured; the
            two differ for files of llama.cpp's `cvector-generator` only.

    Raises:
        SteeringValidationError: it is no control vector.

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
    """Write a control vector, which acts where our vectors act.

    Args:
        path: the file.
        vectors: at `post_block`; `pre_attn` of layer L is the same place as
            `post_block` of layer L - 1, and is written as that.
        writer: whose form: repeng's may have a `direction.0`.
        hint: the model's type, by default that of the provenance.

    Raises:
        SteeringValidationError: a control vector cannot say this.

    """
    import gguf

    directions = _directions(vectors)
    if writer == "llama.cpp" and 0 in directions:
        raise fail(
            "layers: llama.cpp cannot add a vector to the output of block 0 and "
            "refuses direction.0; leave this layer out with --layers",
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
    """Who wrote a file, by the type of its layer count."""
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
    # What the reader raises on a file that is broken or none.
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
    values: Vector = np.array(tensor.data, dtype=np.float32)  # no view of the file
    return values


def _directions(vectors: VectorSet) -> dict[int, Vector]:
    """The vectors by block whose output they are added to."""
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
        f"vectors: a control vector is added to the output of a block; {hook} of "
        f"layer {layer} is no such place. Extract it at post_block instead",
        "vectors",
        f"{hook}.{layer}",
    )
