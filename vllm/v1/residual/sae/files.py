# SPDX-License-Identifier: Apache-2.0
"""Reads tensors and settings from the files of an SAE; no code in them is run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.array_files import read_npz, read_pickled, read_safetensors
from vllm.v1.residual.bounds import failing

Tensors = Mapping[str, torch.Tensor]


class SAEFileError(VLLMValidationError, ValueError):
    """A file or folder is not an SAE that can be used (HTTP 400).

    The message names the parameter, the value and the remedy.
    """


fail = failing(SAEFileError)
"""`fail(message, parameter, value)` makes such an error."""


def bad_file(path: Path, why: object) -> SAEFileError:
    """The error for an invalid file."""
    return fail(f"path: {str(path)!r}: {why}", "path", str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        SAEFileError: the file is missing or contains no object.

    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad_file(path, f"is not a JSON file: {error}") from None
    if not isinstance(found, dict):
        raise bad_file(path, "must hold an object")
    return found


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a `.safetensors`, `.npz`, `.pt` or `.pth` file, on the CPU.

    Raises:
        SAEFileError: the file is missing, damaged, or contains other data.

    """
    if not path.is_file():
        raise bad_file(path, "there is no such file")
    read, otherwise = _READERS.get(path.suffix, (read_pickled, "a file of tensors"))
    try:
        found = read(path)
    except (ValueError, TypeError) as error:
        raise bad_file(path, f"is not {otherwise}: {error}") from None
    if not isinstance(found, dict):
        raise bad_file(path, "must hold tensors by name")
    return {str(k): v for k, v in found.items() if isinstance(v, torch.Tensor)}


def _npz(path: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(one) for name, one in read_npz(path).items()}


_READERS: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    ".safetensors": (read_safetensors, "a safetensors file"),
    ".npz": (_npz, "an archive of arrays"),
}
"""By a file's ending: what reads it, and what it should be."""


def take(tensors: Tensors, path: Path, *names: str) -> torch.Tensor:
    """The tensor with the first of these names that exists.

    Raises:
        SAEFileError: none exists, or it contains NaN or infinity.

    """
    found = take_optional(tensors, path, *names)
    if found is None:
        raise bad_file(path, f"has no {' or '.join(names)}; it has {sorted(tensors)}")
    return found


def take_optional(tensors: Tensors, path: Path, *names: str) -> torch.Tensor | None:
    """As `take`; None if there is none of them."""
    for name in names:
        if name in tensors:
            found = tensors[name]
            if not found.is_floating_point():
                found = found.float()
            if not bool(torch.isfinite(found).all()):
                raise bad_file(path, f"{name} holds NaN or infinity")
            return found
    return None
