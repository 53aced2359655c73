# SPDX-License-Identifier: Apache-2.0
"""Files in other projects' formats, written byte by byte from their descriptions."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_ALIGNMENT = 32
_UINT32, _INT32, _STRING = 4, 5, 8
_DTYPES = {"float32": 0, "float16": 1, "float64": 28}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return struct.pack("<I", kind) + _string(value)
    return struct.pack("<Ii" if kind == _INT32 else "<II", kind, value)


def gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "controlvector",
    layer_count_type: int = _UINT32,
    hint: str = "llama",
) -> Path:
    """A GGUF file, version 3, little endian."""
    pairs = [
        ("general.architecture", _STRING, architecture),
        ("controlvector.model_hint", _STRING, hint),
        ("controlvector.layer_count", layer_count_type, len(tensors)),
    ]
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for name, kind, value in pairs:
        out += _string(name) + _value(kind, value)
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % _ALIGNMENT)
        dims = tensor.shape[::-1]
        out += _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", _DTYPES[str(tensor.dtype)], len(data))
        data += tensor.tobytes()
    out += b"\0" * (-len(out) % _ALIGNMENT)
    path.write_bytes(out + data)
    return path


def repeng(path: Path, directions: dict[int, np.ndarray]) -> Path:
    """A file like repeng's `export_gguf` writes: an unsigned layer count."""
    named = {f"direction.{layer}": vector for layer, vector in directions.items()}
    return gguf(path, named, layer_count_type=_UINT32)


def cvector_generator(path: Path, measured: list[np.ndarray]) -> Path:
    """Like llama.cpp's tool: `measured[i]`, of block i, is direction i + 1."""
    named = {f"direction.{i + 1}": vector for i, vector in enumerate(measured)}
    return gguf(path, named, layer_count_type=_INT32)


def read_gguf(path: Path) -> tuple[dict[str, tuple[int, Any]], dict[str, np.ndarray]]:
    """Read a GGUF file with F32 tensors: typed values, and tensors."""
    raw = path.read_bytes()
    at = 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return found

    def text() -> str:
        nonlocal at
        (size,) = take("Q")
        at += size
        return raw[at - size : at].decode()

    assert take("4sI") == (b"GGUF", 3)
    num_tensors, num_values = take("QQ")
    values: dict[str, tuple[int, Any]] = {}
    for _ in range(num_values):
        name = text()
        (kind,) = take("I")
        value = text() if kind == _STRING else take("i" if kind == _INT32 else "I")[0]
        values[name] = (kind, value)
    infos = []
    for _ in range(num_tensors):
        name = text()
        (rank,) = take("I")
        shape = take(f"{rank}Q")[::-1]
        kind, offset = take("IQ")
        assert kind == 0, "F32"
        infos.append((name, shape, offset))
    start = at + -at % _ALIGNMENT
    tensors = {
        name: np.frombuffer(raw, "<f4", int(np.prod(shape)), start + offset).reshape(
            shape
        )
        for name, shape, offset in infos
    }
    return values, tensors


def saelens(folder: Path, decoder: np.ndarray, **config: Any) -> Path:
    """Write a folder like SAELens' `save_model`."""
    folder.mkdir(exist_ok=True)
    num_features, width = decoder.shape
    said = {"d_in": width, "d_sae": num_features, "architecture": "standard", **config}
    (folder / "cfg.json").write_text(json.dumps(said))
    weights = {
        "W_dec": decoder,
        "W_enc": np.ascontiguousarray(decoder.T),
        "b_dec": np.zeros(width, np.float32),
        "b_enc": np.zeros(num_features, np.float32),
    }
    save_file(weights, folder / "sae_weights.safetensors")
    return folder
