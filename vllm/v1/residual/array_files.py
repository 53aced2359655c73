# SPDX-License-Identifier: Apache-2.0
"""Reads files of arrays that somebody else wrote; no code in them is run.

Every fault of a file is a `ValueError`: the libraries raise what they like for damaged
ones. A file cannot take far more memory than it has bytes.
"""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.plugin_errors import message_of

UNPACKED = 16
"""Most bytes of arrays for each byte of the file; compressed weights have 1 to 2."""
SMALL = 64 << 20
"""Bytes of arrays that any file may have."""

T = TypeVar("T")


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an `.npz` file, by name."""

    def read() -> dict[str, npt.NDArray[Any]]:
        _check_archive(path)
        with np.load(path, allow_pickle=False) as opened:
            return {name: _array(opened[name]) for name in opened.files}

    return _guarded(read)


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array of an `.npy` file."""
    return _guarded(lambda: _array(np.load(path, allow_pickle=False)))


def read_pickled(path: Path) -> Any:
    """The tensors of a `.pt` or `.pth` file, on the CPU, as they were saved."""

    def read() -> Any:
        if zipfile.is_zipfile(path):
            _check_archive(path)
        # `weights_only` refuses everything except plain data.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        _check_size(path, _num_bytes(loaded))
        return loaded

    return _guarded(read)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.safetensors` file, by name."""
    from safetensors import safe_open

    def read() -> dict[str, torch.Tensor]:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    return _guarded(read)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a `.safetensors` file; empty if it has none."""
    from safetensors import safe_open

    def read() -> dict[str, str]:
        with safe_open(path, framework="pt") as opened:
            return dict(opened.metadata() or {})

    return _guarded(read)


def _array(loaded: Any) -> npt.NDArray[Any]:
    if not isinstance(loaded, np.ndarray):
        raise ValueError("it holds something else than arrays")
    return loaded


def _guarded(read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:
        reason = message_of(error).partition("\n")[0] or type(error).__name__
        raise ValueError(reason) from error


def _check_archive(path: Path) -> None:
    """Refuse an archive by what its directory says, before anything is unpacked."""
    with zipfile.ZipFile(path) as archive:
        _check_size(path, sum(one.file_size for one in archive.infolist()))


def _check_size(path: Path, num_bytes: int) -> None:
    most = max(UNPACKED * path.stat().st_size, SMALL)
    if num_bytes > most:
        raise ValueError(
            f"it unpacks to {shown(num_bytes)} bytes, and at most {most} are read, "
            f"{UNPACKED} times its size; save it without compression"
        )


def _num_bytes(loaded: Any) -> int:
    """Bytes of all tensors, as large as they are once they are copied."""
    if isinstance(loaded, torch.Tensor):
        return loaded.numel() * loaded.element_size()
    if isinstance(loaded, Mapping):
        return sum(map(_num_bytes, loaded.values()))
    return 0
