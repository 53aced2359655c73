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

from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.files.own import selected_keys
from vllm.v1.steering.spec.files.vectors import VectorSet, vector_set
from vllm.v1.steering.spec.provenance import Provenance
from vllm.v1.steering.spec.reading import Layers

ARCHITECTURE = "controlvector"
HOOK = "post_block"

Writer = Literal["repeng", "llama.cpp"]


def read_gguf(
    path: str | Path, layers: Layers = "applied", key: str | None = None
) -> VectorSet:
    """Read a control vector file.

    Args:
        path: the file.
        layers: whether to put `direction.L` where it is applied or where it was
            measured; they differ only for files of llama.cpp's `cvector-generator`.
        key: the name of the tensor to read, such as `direction.3`; all by default.

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
    tensors = {
        tensor.name: tensor
        for tensor in reader.tensors
        if tensor.name.startswith("direction.")
    }
    vectors = {
        (_layer(name, shift, path), HOOK): _values(tensors[name], path)
        for name in selected_keys(tensors, key, Path(path))
    }
    origin = f"{Path(path).name}, a control vector in the form of {writer}"
    hint = _text(reader, f"{ARCHITECTURE}.model_hint")
    said = Provenance(model_type=hint, origin=f"{origin}, layers as {layers}")
    return vector_set(vectors, said, str(path))


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
        return _bounded(gguf.GGUFReader)(path)
    # The reader raises any of these for an invalid file.
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise fail(
            f"path: {path.name!r} is not a GGUF file: {error}", "path", str(path)
        ) from None


def _bounded(reader: Any) -> Any:
    """The reader, which stops at the file's end instead of counting to 2**50."""

    class Bounded(reader):
        def _get(self, offset: int, *args: Any, **kwargs: Any) -> Any:
            if offset >= len(self.data):
                raise ValueError("it ends before the values that its header counts")
            return super()._get(offset, *args, **kwargs)

    return Bounded


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
