# SPDX-License-Identifier: Apache-2.0
"""Single or named tensors in `.pt`, `.npy`, `.npz` and `.safetensors` files.

Supported keys:

- `HOOK.LAYER`, such as `post_block.3`, which is also what we write;
- `{hook: {layer: vector}}` (`.pt` only);
- any name for a single vector `[hidden_size]`; the caller gives its hook and layer;
- a number, such as `3`, `layer_3`, `layers.3` or `direction.3`. The rows of a tensor
  `[n, hidden_size]` have the numbers 0 to n - 1. The caller states what numbers mean,
  see `NUMBERS`.
"""

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.parse import HOOKS
from vllm.v1.steering.spec.provenance import Provenance

Numbers = Literal["block", "hidden_states"]

NUMBERS: dict[str, str] = {
    "block": "k is block k, counted from 0, at the chosen hook point",
    "hidden_states": "k is the index into transformers' hidden_states: 0 is the "
    "embedding (pre_attn of block 0), k > 0 the output of block k - 1",
}

_NUMBER = re.compile(r"(?:(?:layer|layers|direction|hidden_states)[._]?)?(\d{1,4})")


def read_dictionary(
    path: str | Path,
    numbers: Numbers | None = None,
    hook: str = "post_block",
    layer: int | None = None,
    key: str | None = None,
) -> VectorSet:
    """Read the vectors of a `.pt`, `.npy`, `.npz` or `.safetensors` file.

    Args:
        path: the file. Pickled code is not executed.
        numbers: the meaning of numeric keys.
        hook: the hook point for `numbers="block"` and for a single vector.
        layer: the layer of a single vector; of several vectors, the one to read.
        key: the name of the tensor to read; all by default.

    Raises:
        SteeringValidationError: the file is invalid, or a key is ambiguous.

    """
    file = Path(path)
    if not file.is_file():
        raise fail(f"path: there is no file {str(path)!r}", "path", str(path))
    raw = _LOADERS.get(file.suffix, _load_pt)(file)
    if key is not None:
        raw = _chosen(raw, key, file)
    alone = _alone(raw)
    if alone is not None and layer is not None:
        origin = Provenance(origin=f"{file.name}, one vector")
        return vector_set({(layer, hook): alone}, origin, str(path))
    vectors: dict[Tap, Any] = {}
    for name, vector in _entries(raw, file):
        tap = _tap(name, numbers, hook, file)
        if layer not in (None, tap[0]):
            continue
        if tap in vectors:
            raise fail(
                f"path: {file.name!r} gives {tap[1]} of layer {tap[0]} twice",
                "path",
                str(name),
            )
        vectors[tap] = vector
    whence = Provenance(origin=f"{file.name}, a dictionary")
    return vector_set(vectors, whence, str(path))


def write_dictionary(path: str | Path, vectors: VectorSet) -> None:
    """Write `{"HOOK.LAYER": vector}`, without the provenance."""
    named = {f"{hook}.{layer}": v for (layer, hook), v in vectors.vectors.items()}
    if Path(path).suffix == ".npz":
        np.savez(path, **named)  # type: ignore[arg-type]
    else:
        tensors = {name: torch.from_numpy(v.copy()) for name, v in named.items()}
        torch.save(tensors, path)


def _load_pt(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise fail(
            f"path: {file.name!r} cannot be read as tensors only: {reason}",
            "path",
            str(file),
        ) from None


def _load_npz(file: Path) -> Any:
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise fail(
            f"path: {file.name!r} is not an .npz file of numbers: {error}",
            "path",
            str(file),
        ) from None


def _load_npy(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise fail(
            f"path: {file.name!r} is not an .npy file of numbers: {error}",
            "path",
            str(file),
        ) from None


def _load_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise fail(
            f"path: {file.name!r} is not a safetensors file: {error}",
            "path",
            str(file),
        ) from None


_LOADERS = {".npz": _load_npz, ".npy": _load_npy, ".safetensors": _load_safetensors}


def _chosen(raw: Any, key: str, file: Path) -> Any:
    """The value of `key`; fails if there is none."""
    found = raw.get(key) if isinstance(raw, Mapping) else None
    if found is None:
        having = [str(name) for name in raw] if isinstance(raw, Mapping) else []
        raise fail(
            f"key: {file.name!r} has no {shown(key)}; it has {listed(having)}",
            "key",
            key,
        )
    return found


def _alone(raw: Any) -> Any:
    """The vector `[hidden_size]` if it is the file's only content, else None."""
    if isinstance(raw, Mapping):
        values = list(raw.values())
        return _alone(values[0]) if len(values) == 1 else None
    shape = np.shape(raw)
    if len(shape) == 2 and shape[0] == 1:
        return raw[0]
    return raw if len(shape) == 1 else None


def _entries(raw: Any, file: Path) -> Iterator[tuple[Any, Any]]:
    """Yield keys and vectors `[hidden_size]`."""
    if _alone(raw) is not None and not isinstance(raw, Mapping):
        raise fail(
            f"layer: {file.name!r} holds one vector without its place; give --layer, "
            "and --hook if it is not post_block",
            "layer",
            None,
        )
    if isinstance(raw, (torch.Tensor, np.ndarray)) and raw.ndim == 2:
        yield from enumerate(raw)
        return
    if not isinstance(raw, Mapping) or not raw:
        raise fail(
            f"path: {file.name!r} must hold a dictionary of vectors, or one tensor "
            "[n, hidden_size]",
            "path",
            type(raw).__name__,
        )
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{layer}", vector) for layer, vector in value.items())
        elif np.ndim(value) == 2 and len(raw) == 1:
            yield from enumerate(value)
        else:
            yield key, value


def _tap(key: Any, numbers: Numbers | None, hook: str, file: Path) -> Tap:
    text = str(key)
    name, _, layer = text.rpartition(".")
    if name in HOOKS and layer.isascii() and layer.isdigit():
        return int(layer), name
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise fail(
            f"path: the key {text!r} of {file.name!r} is neither HOOK.LAYER, with one "
            f"of the hook points {list(HOOKS)}, nor a number; for a tensor of another "
            "name give --key, and its place with --layer and --hook",
            "path",
            text,
        )
    if numbers is None:
        raise fail(
            f"numbers: the key {text!r} of {file.name!r} is a number, which has "
            "several meanings; choose one with --numbers:  "
            + "; ".join(f"{name}: {what}" for name, what in NUMBERS.items()),
            "numbers",
            None,
        )
    number = int(found[1])
    if numbers == "block":
        return number, hook
    return (number - 1, "post_block") if number else (0, "pre_attn")
