# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of readouts on the device: one function call per job.

Legend: R rows of a job. The rows of its entries follow one another; within an entry the
rows of a token's taps are adjacent. The first dimension of a result is R, or the number
of entries if rows are reduced.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readouts.modules import ProbeModule
from vllm.v1.readouts.worker.jobs import Entry, Indices, Job
from vllm.v1.residual.heads import rows_of_heads
from vllm.v1.residual.readout_plan import Probe, Readout, RowPart

Arrays: TypeAlias = dict[str, torch.Tensor]


def part_of(rows: torch.Tensor, part: RowPart | None) -> torch.Tensor:
    """What is read of rows.

    Args:
        rows: `[..., R * part.each, hidden_size]`, staging rows.
        part: None for all of them.

    Returns:
        `[..., R, part.read]`.

    """
    if part is None:
        return rows
    *before, _, hidden_size = rows.shape
    rows = rows.view(*before, -1, part.each * hidden_size)[..., : part.width]
    if part.heads:
        return rows_of_heads(rows, part.heads, part.head_size)
    return rows.contiguous()


def reduce_rows(job: Job, staging: torch.Tensor, first_row: int) -> Arrays:
    """Reduce each entry's rows over its tokens.

    Returns:
        `rows` `[entries, taps, width]` float32. For `mean` this is the sum; the
        front end divides.

    """
    how = job.key[1]
    rows = torch.stack(
        [_reduced(how, entry.rows, staging, first_row) for entry in job.entries]
    )
    return {"rows": part_of(rows, job.part)}


def _reduced(
    how: str, rows: np.ndarray, staging: torch.Tensor, first_row: int
) -> torch.Tensor:
    """Reduce one entry to `[taps, hidden_size]`; `rows` is `[count, taps]`."""
    count = len(rows)
    if how == "last":
        index = torch.from_numpy(rows[-1] + first_row).to(staging.device)
        return staging[index].float()
    starts = rows[0] + first_row
    gaps = np.unique(np.diff(starts))
    # Rows of a prompt are contiguous per tap: slices avoid a gather, one view of all
    # taps also a kernel for each.
    if not (np.diff(rows, axis=0) == 1).all():
        columns = [torch.from_numpy(rows[:, t] + first_row) for t in range(len(starts))]
        parts = [staging[column.to(staging.device)][None] for column in columns]
    elif len(gaps) == 1 and gaps[0] > 0 and staging.is_contiguous():
        width = staging.shape[1]
        shape, strides = (len(starts), count, width), (int(gaps[0]) * width, width, 1)
        parts = [staging[int(starts[0]) :].as_strided(shape, strides)]
    else:
        parts = [staging[start : start + count][None] for start in starts.tolist()]
    if how == "max":
        return torch.cat([part.amax(dim=1).float() for part in parts])
    return torch.cat([part.sum(dim=1, dtype=torch.float32) for part in parts])


def norms(job: Job, rows: torch.Tensor) -> Arrays:
    """Euclidean norms, and the cosine to the same token's row at the previous layer.

    Returns:
        `norm` and `cosine`, both `[R]` float32; the cosine is NaN at layer 0.

    """
    if "before" not in job.kept:
        of_before = _rows_before(job)
        found = async_tensor_h2d(of_before, device=rows.device)
        missing = found < 0 if (of_before < 0).any() else None
        job.kept["before"] = found.clamp(min=0), missing
    before, missing = job.kept["before"]
    wide = rows.float()
    lengths = wide.norm(dim=-1)
    products = (wide * wide.index_select(0, before)).sum(dim=-1)
    cosine = products / (lengths * lengths.index_select(0, before))
    if missing is not None:
        cosine = cosine.masked_fill(missing, float("nan"))
    return {"norm": lengths, "cosine": cosine}


def _rows_before(job: Job) -> Indices:
    """`[R]`: index of the row at the previous layer within the job, or -1."""
    before = []
    for _, alike in groupby(job.entries, _norm_of):
        entries = list(alike)
        ahead = _taps_before(entries[0].readout)
        tokens = [
            row
            for one in entries
            for row in range(one.first, one.first + len(ahead) * one.count, len(ahead))
        ]
        rows = np.array(tokens)[:, None] + ahead
        before.append(np.where(ahead < 0, -1, rows).reshape(-1))
    return np.concatenate(before)


def _norm_of(entry: Entry) -> object:
    return entry.readout.taps, entry.readout.after, entry.readout.alone


def _taps_before(readout: Readout) -> np.ndarray:
    """For each staged tap, the index of the one at the previous layer, or -1."""
    place = {tap: number for number, tap in enumerate(readout.staged)}
    return np.array([place.get((layer - 1, hook), -1) for layer, hook in place])


def inline_probe(probe: Probe, device: torch.device) -> ProbeModule:
    """A probe given in a request, on the device."""
    vectors = torch.frombuffer(bytearray(probe.vectors), dtype=torch.float32)
    threshold = torch.tensor(probe.threshold) if probe.threshold else None
    return ProbeModule(
        vectors=vectors.reshape(len(probe.bias), -1).to(device),
        bias=torch.tensor(probe.bias).to(device),
        threshold=None if threshold is None else threshold.to(device),
        activation=probe.activation,
        cosine=probe.cosine,
    )


def probe_values(module: ProbeModule, rows: torch.Tensor) -> Arrays:
    """`activation(rows @ vectors.T + bias)`, `[R, k]` float32.

    With probes from `stacked`, row i is read by probe i.
    """
    wide, vectors = rows.float(), module.vectors
    if module.cosine:
        wide = nn.functional.normalize(wide, dim=-1)
        vectors = nn.functional.normalize(vectors, dim=-1)
    each = vectors.dim() == 3
    read = torch.bmm(vectors, wide[:, :, None])[:, :, 0] if each else wide @ vectors.T
    return {"values": activated(read + module.bias, module)}


def stacked(modules: Sequence[ProbeModule]) -> ProbeModule:
    """R probes of equal size and activation as one, `[R, k, hidden_size]`."""
    first = modules[0]
    return ProbeModule(
        vectors=torch.stack([one.vectors for one in modules]),
        bias=torch.stack([one.bias for one in modules]),
        threshold=first.threshold,
        activation=first.activation,
        cosine=first.cosine,
    )


def activated(values: torch.Tensor, module: ProbeModule) -> torch.Tensor:
    """Apply a probe's activation to `[R, k]`."""
    if module.activation == "relu":
        return values.relu()
    if module.activation == "sigmoid":
        return values.sigmoid()
    if module.activation == "softmax":
        return values.softmax(dim=-1)
    if module.activation == "jumprelu":
        assert module.threshold is not None
        return torch.where(values > module.threshold, values, 0.0)
    return values
