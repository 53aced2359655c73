# SPDX-License-Identifier: Apache-2.0
"""Single or named tensors in `.pt`, `.npy`, `.npz` and `.safetensors` files.

Supported keys:

- `HOOK.LAYER`, such as `post_block.3`, which is also what we write;
- `{hook: {layer: vector}}` (`.pt` only);
- any other name, or none, for a single vector `[hidden_size]`; the caller gives its
  layer and hook point;
- a number, such as `3`, `layer_3`, `layers.3` or `direction.3`. The rows of a tensor
  `[n, hidden_size]` have the numbers 0 to n - 1. The caller states what numbers mean,
  see `NUMBERS`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.v1.residual.array_files import (
    read_npy,
    read_npz,
    read_pickled,
    read_safetensors,
)
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files.own import selected_keys
from vllm.v1.steering.spec.files.vectors import VectorSet, vector_set
from vllm.v1.steering.spec.parse import HOOKS
from vllm.v1.steering.spec.provenance import Provenance
from vllm.v1.steering.spec.reading import NUMBERS, Numbers, Reading

_NUMBER = re.compile(r"(?:(?:layer|layers|direction|hidden_states)[._]?)?(\d{1,4})")


def read_dictionary(file: Path, reading: Reading) -> VectorSet:
    """Read the vectors of a `.pt`, `.npy`, `.npz` or `.safetensors` file.

    Pickled code is not executed.

    Args:
        file: the file.
        reading: the name of the tensor to read, if not all are read; the meaning of
            numeric keys, and their hook point, `post_block` by default; the layer and
            the hook point of a vector without a place; of others, those to read, if
            there are such.

    Raises:
        SteeringValidationError: the file is invalid, a key is ambiguous, or nothing
            has the given key.

    """
    tensors = _tensors(_loaded(file), file)
    if (key := reading.key) is not None:
        tensors = {str(name): tensor for name, tensor in tensors.items()}
        tensors = {name: tensors[name] for name in selected_keys(tensors, key, file)}
    numbers = reading.numbers
    entries = list(_entries(tensors, numbers))
    numbered = [name for name, _ in entries if _NUMBER.fullmatch(str(name))]
    if numbers is not None and not numbered:
        raise fail(
            f"numbers: no key of {file.name!r} is a number; leave out {numbers!r}",
            "numbers",
            numbers,
        )
    if len(entries) == 1 and not numbered and _named_place(entries[0][0]) is None:
        place = _stated(entries[0][0], reading, file)
        origin = Provenance(origin=f"{file.name}, one vector")
        return vector_set({place: entries[0][1]}, origin, str(file))
    vectors: dict[Tap, Any] = {}
    for name, vector in entries:
        tap = _tap(name, reading, file)
        if tap in vectors:
            raise fail(
                f"path: {file.name!r} gives {tap[1]} of layer {tap[0]} twice",
                "path",
                str(name),
            )
        vectors[tap] = vector
    origin = Provenance(origin=f"{file.name}, a dictionary")
    wanted = {tap: vector for tap, vector in vectors.items() if reading.selects(tap)}
    return vector_set(wanted or vectors, origin, str(file))


_READERS: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    ".npz": (read_npz, "is not an .npz file of numbers"),
    ".npy": (read_npy, "is not an .npy file of numbers"),
    ".safetensors": (read_safetensors, "is not a safetensors file"),
}
"""By a file's ending: what reads it, and what a file that it cannot read is not."""


def _loaded(file: Path) -> Any:
    reader = (read_pickled, "cannot be read as tensors only")
    read, otherwise = _READERS.get(file.suffix, reader)
    try:
        return read(file)
    except ValueError as error:
        raise fail(
            f"path: {file.name!r} {otherwise}: {error}", "path", str(file)
        ) from None


def _tensors(raw: Any, file: Path) -> dict[Any, Any]:
    """The tensors of a file by key; the key of a tensor alone is None."""
    if isinstance(raw, (torch.Tensor, np.ndarray)) and raw.ndim in (1, 2):
        return {None: raw}
    if not isinstance(raw, Mapping) or not raw:
        raise fail(
            f"path: {file.name!r} must hold a dictionary of vectors, or one tensor "
            "[hidden_size] or [n, hidden_size]",
            "path",
            type(raw).__name__,
        )
    found: dict[Any, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{layer}": vector for layer, vector in value.items()}
        else:
            found[key] = value
    return found


def _entries(
    tensors: Mapping[Any, Any], numbers: Numbers | None
) -> Iterator[tuple[Any, Any]]:
    """Yield keys and vectors `[hidden_size]`; rows of an only tensor are numbered."""
    for key, value in tensors.items():
        if np.ndim(value) != 2 or len(tensors) > 1 or _named_place(key) is not None:
            yield key, value
        elif len(value) == 1 and numbers is None:
            yield key, value[0]
        else:
            yield from enumerate(value)


def _stated(key: Any, reading: Reading, file: Path) -> Tap:
    """The place of the only vector of a file that does not name one."""
    if reading.layer is None:
        named = "" if key is None else f", {str(key)!r} (not named HOOK.LAYER),"
        raise fail(
            f"layer: {file.name!r} holds one vector{named} without its place; give "
            "--layer, and --hook if it is not post_block",
            "layer",
            None,
        )
    return reading.layer, reading.hook or "post_block"


def _named_place(key: Any) -> Tap | None:
    """The place that a key `HOOK.LAYER` names."""
    name, _, layer = str(key).rpartition(".")
    is_place = name in HOOKS and layer.isascii() and layer.isdigit()
    return (int(layer), name) if is_place else None


def _tap(key: Any, reading: Reading, file: Path) -> Tap:
    if (place := _named_place(key)) is not None:
        return place
    found = _NUMBER.fullmatch(str(key))
    if found is None:
        raise fail(
            f"path: the key {str(key)!r} of {file.name!r} is neither HOOK.LAYER, with "
            f"one of the hook points {list(HOOKS)}, nor a number; for a tensor of "
            "another name give --key, and its place with --layer and --hook",
            "path",
            str(key),
        )
    if reading.numbers is None:
        raise fail(
            f"numbers: the key {str(key)!r} of {file.name!r} is a number, which has "
            "several meanings; choose one with --numbers:  "
            + "; ".join(f"{name}: {what}" for name, what in NUMBERS.items()),
            "numbers",
            None,
        )
    number = int(found[1])
    if reading.numbers == "block":
        return number, reading.hook or "post_block"
    return (number - 1, "post_block") if number else (0, "pre_attn")
