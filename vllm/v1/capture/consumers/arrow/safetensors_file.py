# SPDX-License-Identifier: Apache-2.0
"""One safetensors file per request, compatible with upstream's hidden-states files.

The tensors are `hidden_states` `[rows, taps, hidden_size]` and `token_ids` `[rows]`, as
upstream's hidden-states connector writes them, and `positions` `[rows]`. The metadata
lists the taps in order. Upstream's reader waits for a lock on a file `{path}.lock`.
Therefore an empty file of this name is created, which is never locked, because the file
is complete when it gets its name.

The format (https://github.com/huggingface/safetensors) is the length of a JSON header
as 8 bytes, the header, which may be padded with spaces, and the bytes of the tensors.
"""

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.math_utils import round_up
from vllm.v1.capture.consumers.storage.files import Workspace, publish
from vllm.v1.capture.consumers.storage.stored_request import (
    StoredRequest,
    results_of,
)
from vllm.v1.capture.delivery.row_bytes import write_all, write_scattered
from vllm.v1.capture.types import CaptureFinalize, CaptureResult

NO_TOKEN = -1
"""Token id at positions of a prompt that was given as embeddings."""

ALIGNMENT = 4096
"""Bytes to which the start of the rows in the file is aligned."""

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BLOCK_BYTES = 64 << 20


def write_safetensors(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    workspace: Workspace,
    place: tuple[str, str],
    fsync: bool,
) -> list[CaptureResult]:
    """Write all keys of a request to `{tag}/{name}.safetensors`.

    Args:
        request: the request.
        finalizes: its keys, at least one.
        workspace: the consumer's root.
        place: `(tag, name)`.
        fsync: whether to sync the file to disk.

    Returns:
        The result of each key; the first has the path as its payload.

    Raises:
        OSError: nothing was written.
        ValueError: the keys have different positions.

    """
    ordered = sorted(finalizes, key=lambda finalize: finalize.key[1:])
    sidecar = ordered[0].sidecar
    if any(final.sidecar["positions"] != sidecar["positions"] for final in ordered):
        raise ValueError("the safetensors layout needs the same positions everywhere")
    tag, name = place
    if sidecar["pipeline_parallel_size"] > 1:
        name += f"-pp{sidecar['pipeline_parallel_rank']:02d}"
    final = str(workspace.folder(tag) / f"{name}.safetensors")
    path, file = workspace.create()
    try:
        head = _head(ordered, place[1])
        write_all(file, [head], len(head))
        _write_rows(file, len(head), request, ordered)
        if fsync:
            os.fsync(file)
        request.commit()
        _name(path, final, fsync)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(file)
    return results_of(ordered, [final])


def _name(path: str, final: str, fsync: bool) -> None:
    Path(f"{final}.lock").touch()
    try:
        publish(path, final, replace=True, fsync=fsync)
    except BaseException:
        os.unlink(f"{final}.lock")
        raise


def _head(ordered: list[CaptureFinalize], request_id: str) -> bytes:
    """The bytes before the rows: header, token ids and positions."""
    sidecar = ordered[0].sidecar
    tokens = [NO_TOKEN if token is None else token for token in sidecar["token_ids"]]
    facts = [
        np.array(column, dtype="<i8").tobytes()
        for column in (tokens, sidecar["positions"])
    ]
    shape = sidecar["num_rows"], len(ordered), sidecar["hidden_size"]
    row_bytes = getattr(torch, sidecar["dtype"]).itemsize * shape[1] * shape[2]
    ends = 0, len(facts[0]), 2 * len(facts[0]), 2 * len(facts[0]) + shape[0] * row_bytes
    header: dict[str, Any] = {
        "__metadata__": {
            "model": str(sidecar["model"]),
            "layer_convention": sidecar["layer_convention"],
            "request_id": request_id,
            "taps": json.dumps([list(finalize.key[1:]) for finalize in ordered]),
            **({"heads": json.dumps(sidecar["heads"])} if "heads" in sidecar else {}),
        },
        "token_ids": _tensor("I64", shape[:1], ends[0:2]),
        "positions": _tensor("I64", shape[:1], ends[1:3]),
        "hidden_states": _tensor(_DTYPES[sidecar["dtype"]], shape, ends[2:4]),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    length = round_up(8 + len(text) + ends[2], ALIGNMENT) - 8 - ends[2]
    return b"".join([struct.pack("<Q", length), text.ljust(length), *facts])


def _tensor(
    dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _write_rows(
    file: int, offset: int, request: StoredRequest, ordered: list[CaptureFinalize]
) -> None:
    """Write `[rows, taps, hidden_size]` directly from the memory of each tap's rows."""
    blocks = [list(request.blocks(finalize, _BLOCK_BYTES)) for finalize in ordered]
    rows = np.stack([_addresses(own) for own in blocks], axis=1)  # [rows, taps]
    sidecar = ordered[0].sidecar
    size = sidecar["hidden_size"] * getattr(torch, sidecar["dtype"]).itemsize
    write_scattered(file, rows.reshape(-1), size, offset)


def _addresses(blocks: list[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """The memory address of each row in blocks `[rows, hidden_size]`."""
    found = [
        block.data_ptr() + np.arange(len(block), dtype=np.uint64) * _apart(block)
        for block in blocks
    ]
    return np.concatenate([np.empty(0, np.uint64), *found]).astype(np.uint64)


def _apart(block: torch.Tensor) -> np.uint64:
    assert block.stride(1) == 1 or not block.numel(), "rows lie in one piece each"
    return np.uint64(block.stride(0) * block.itemsize)
