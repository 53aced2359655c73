# SPDX-License-Identifier: Apache-2.0
"""Reading captured rows back from files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def read_per_file(path: str | Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """The rows of one key and their sidecar.

    Args:
        path: the `.bin` file, or its `.json`.

    Returns:
        A tensor `[rows, hidden_size]` in the dtype that was captured, and the
        sidecar.

    Raises:
        FileNotFoundError: the file or its sidecar is not there.
        ValueError: the file's size is not what the sidecar says.

    """
    path = Path(path)
    sidecar = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    dtype = getattr(torch, sidecar["dtype"])
    data = bytearray(path.with_suffix(".bin").read_bytes())
    rows, width = sidecar["shape"]
    if len(data) != rows * width * dtype.itemsize:
        raise ValueError(
            f"{path.with_suffix('.bin')} has {len(data)} bytes, but {rows} rows of "
            f"{width} {sidecar['dtype']} values have {rows * width * dtype.itemsize}"
        )
    if not data:
        return torch.empty(rows, width, dtype=dtype), sidecar
    return torch.frombuffer(data, dtype=dtype).view(rows, width), sidecar


def read_request(
    root: str | Path, tag: str, request_id: str
) -> dict[tuple[int, str], torch.Tensor]:
    """All rows of one request, by `(layer, hook)`.

    Raises:
        FileNotFoundError: nothing was captured under this tag and id.

    """
    folder = Path(root) / tag / request_id
    if not folder.is_dir():
        raise FileNotFoundError(f"no capture of {request_id!r} under {folder.parent}")
    return {
        (sidecar["layer"], sidecar["hook"]): rows for rows, sidecar in _all_keys(folder)
    }


def _all_keys(folder: Path) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for path in sorted(folder.glob("*_*.json")):
        yield read_per_file(path)
