# SPDX-License-Identifier: Apache-2.0
"""One safetensors file per request, as readers of hidden states know it.

`hidden_states` is `[rows, taps, hidden_size]` and `token_ids` `[rows]`, the shapes
that upstream's own connector for hidden states writes; `positions` is `[rows]`, and
the metadata names the taps in their order. Upstream's reader waits for the lock of a
file `{path}.lock`, so an empty one lies beside each, never locked: the file is whole.
"""

import contextlib
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm.v1.capture.consumers.storage.files import Workspace, publish
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult

NO_TOKEN = -1
"""Token id of a position whose prompt was given as embeddings."""

_BLOCK_BYTES = 8 << 20


def write_safetensors(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    workspace: Workspace,
    place: tuple[str, str],
    fsync: bool,
) -> list[CaptureResult]:
    """Write all keys of a request to `{tag}/{name}.safetensors`.

    Raises:
        OSError: nothing was written.
        ValueError: the keys do not have the same positions.

    """
    ordered = sorted(finalizes, key=lambda finalize: finalize.key[1:])
    sidecar = ordered[0].sidecar
    if any(final.sidecar["positions"] != sidecar["positions"] for final in ordered):
        raise ValueError("the safetensors layout needs the same positions everywhere")
    tag, name = place
    if sidecar["pipeline_parallel_size"] > 1:
        name += f"-pp{sidecar['pipeline_parallel_rank']:02d}"
    final = str(workspace.folder(tag) / f"{name}.safetensors")
    tokens = [NO_TOKEN if token is None else token for token in sidecar["token_ids"]]
    tensors = {
        "hidden_states": _stacked(request, ordered),
        "token_ids": torch.tensor(tokens, dtype=torch.int64),
        "positions": torch.tensor(sidecar["positions"], dtype=torch.int64),
    }
    metadata = {
        "model": str(sidecar["model"]),
        "layer_convention": sidecar["layer_convention"],
        "request_id": place[1],
        "taps": json.dumps([list(finalize.key[1:]) for finalize in ordered]),
    }
    path, fd = workspace.create()
    try:
        save_file(tensors, path, metadata)
        if fsync:
            os.fsync(fd)
        Path(f"{final}.lock").touch()
        try:
            publish(path, final, replace=True, fsync=fsync)
        except BaseException:
            os.unlink(f"{final}.lock")
            raise
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        if isinstance(error, (OSError, ValueError)):
            raise
        raise OSError(f"safetensors could not write: {error}") from error
    finally:
        os.close(fd)
    first, *others = (finalize.key for finalize in ordered)
    return [
        CaptureResult(first, "ok", payload=[final]),
        *(CaptureResult(key, "ok") for key in others),
    ]


def _stacked(request: StoredRequest, ordered: list[CaptureFinalize]) -> torch.Tensor:
    sidecar = ordered[0].sidecar
    dtype = getattr(torch, sidecar["dtype"])
    shape = sidecar["num_rows"], len(ordered), sidecar["hidden_size"]
    stacked = torch.empty(shape, dtype=dtype)
    for index, finalize in enumerate(ordered):
        done = 0
        for rows in request.blocks(finalize, _BLOCK_BYTES):
            stacked[done : done + len(rows), index] = rows
            done += len(rows)
        if done != shape[0]:
            raise OSError(f"only {done} of {shape[0]} rows are there")
    return stacked
