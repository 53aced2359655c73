# SPDX-License-Identifier: Apache-2.0
"""Results of readouts as keys of a request, beside those of its rows.

A key's hook is `HOOK.NAME.ARRAY`, such as `post_block.lens.logprobs`. Its rows are the
array's values at the key's layer and hook point, one row per position.
"""

from typing import Any

import torch

from vllm.v1.capture.types import CaptureChunk, CaptureFinalize, CaptureKey
from vllm.v1.residual.readout_plan import Readout, ReadoutRows


def chunks_of(
    key: CaptureKey, rows: ReadoutRows, positions: list[int]
) -> list[CaptureChunk]:
    """A chunk with all values `[rows, values]`; none if there are no rows."""
    if not positions:
        return []
    dtype = getattr(torch, rows.dtype)
    values = torch.frombuffer(bytearray(rows.data), dtype=dtype)
    tensor = values.view(len(positions), -1)
    return [CaptureChunk(key, tensor, dtype, 0, -1, {"positions": positions})]


def finalize_of(
    key: CaptureKey, rows: ReadoutRows, facts: dict[str, Any]
) -> CaptureFinalize:
    """The end of a key; `facts` are those about the request and the positions."""
    _, layer, hook = key
    readout: dict[str, Any] = {"name": rows.name, "kind": rows.kind}
    readout |= {"array": rows.array, "hook": rows.tap[1], "shape": list(rows.shape)}
    if rows.reduced:
        readout["reduced_positions"] = rows.positions
    width = torch.Size(rows.shape).numel()
    own = {"dtype": rows.dtype, "hidden_size": width, "readout": readout}
    return CaptureFinalize(key, {**facts, **own, "layer": layer, "hook": hook})


def nothing_of(readout: Readout) -> ReadoutRows:
    """What a consumer takes of a readout without results: a key without rows."""
    return ReadoutRows(
        name=readout.name,
        kind=readout.kind,
        array="none",
        tap=readout.taps[-1],
        positions=[],
        dtype="float32",
        shape=(0,),
        data=b"",
    )
