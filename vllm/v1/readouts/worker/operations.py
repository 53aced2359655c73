# SPDX-License-Identifier: Apache-2.0
"""The operations of jobs on the device: one function call per job.

Legend: R rows of a job. The rows of its entries follow one another; within an entry the
rows of a token's taps are adjacent. The first dimension of a result is R, or the number
of entries if rows are reduced.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readouts.modules import ProbeModule, TranslatorModule
from vllm.v1.readouts.worker.attribution import Attribution, Directions
from vllm.v1.readouts.worker.custom import CustomReadouts
from vllm.v1.readouts.worker.head import Head
from vllm.v1.readouts.worker.jobs import Arrays, Indices, Job, ReadingRequest
from vllm.v1.readouts.worker.pending import JobResult
from vllm.v1.readouts.worker.sae import sae_values
from vllm.v1.readouts.worker.top_tokens import BEST
from vllm.v1.residual.heads import rows_of_heads
from vllm.v1.residual.readout_plan import Probe, Readout, RowPart
from vllm.v1.residual.sae import SparseAutoencoder
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import in_front

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Operations:
    """Computes jobs on the device. Engine thread only."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        head: Head,
        attribution: Attribution,
        requests: Mapping[str, ReadingRequest],
        device: torch.device,
    ) -> None:
        """Start without custom readouts.

        Args:
            vllm_config: the engine's configuration.
            head: of the model.
            attribution: the linear form of the head.
            requests: those with readouts, by id; kept up to date by the caller.
            device: the device of the model.

        """
        self._head = head
        self._attribution = attribution
        self._requests = requests
        self._device = device
        self._custom = CustomReadouts(vllm_config)
        self.view: StepView
        """The batch of the step; set by the caller."""

    def lens_of_ranks(self, job: Job, rows: torch.Tensor | str) -> Arrays:
        """The arrays of a lens of tensor-parallel ranks, as of `compute`. A collective.

        Args:
            job: of the lens; one that no rank refuses.
            rows: `[R, hidden_size]`, or the text of the error why rank 0 has none;
                only the number counts on other ranks.

        Returns:
            No arrays but on rank 0.

        Raises:
            Exception: this rank has failed.

        """
        _, top_k, tokens, translator = job.key
        error: Exception | None = None
        own = self._head.no_rows(job.num_rows)
        adapters = self._adapters(job) if self._head.has_adapters else None
        if isinstance(rows, str):
            error = RuntimeError(rows)
        elif self._head.keeps_logits:
            try:
                own = rows if translator is None else translated(job, rows, translator)
            except Exception as raised:
                error = raised
        best = self._head.lens_values(own, top_k, tokens, adapters, error)
        return {} if best is None else {BEST: best}

    def compute(self, job: Job, rows: torch.Tensor, result: JobResult) -> Arrays:
        """The arrays of a job's result; of a lens what becomes them on the host.

        Args:
            job: not one that reduces rows.
            rows: `[R, width]`, what is read of each row.
            result: gets the errors of entries.

        """
        match job.key:
            case ("probe", ProbeModule() as module):
                return probe_values(module, rows)
            case ("probes", *_):
                return self._own_probes(job, rows)
            case ("lens", *_) if self._head.refusal:
                # An error of these requests: the step has others as well.
                refused = f"no lens on this model: {self._head.refusal}"
                result.errors.update(dict.fromkeys(range(len(job.entries)), refused))
                return {}
            case ("lens", top_k, tokens, translator):
                if translator is not None:
                    rows = translated(job, rows, translator)
                adapters = self._adapters(job) if self._head.has_adapters else None
                best = self._head.lens_values(rows, top_k, tokens, adapters)
                assert best is not None, "one rank alone keeps its logits"
                return {BEST: best}
            case ("sae", SparseAutoencoder() as sae, top_k, features):
                return sae_values(sae, rows, top_k, features)
            case ("attribution", Directions() as directions):
                return self._attribution.compute(job, rows, directions, result.errors)
            case ("norm",):
                return norms(job, rows)
            case ("custom", *_):
                return self._custom_values(job, rows, result)
        return {"rows": rows}

    def _adapters(self, job: Job) -> list[int]:
        """For each row of a job, the number of its request's LoRA adapter."""
        return [
            self._requests[entry.req_id].adapter
            for entry in job.entries
            for _ in range(entry.num_rows)
        ]

    def _own_probes(self, job: Job, rows: torch.Tensor) -> Arrays:
        """Probes given in requests: a single product if each entry has one row."""
        each = all(entry.count == 1 for entry in job.entries)
        if "probes" not in job.kept:
            probes = (entry.readout.probe for entry in job.entries)
            found = [inline_probe(one, self._device) for one in probes if one]
            job.kept["probes"] = [stacked(found)] if each else found
        modules: list[ProbeModule] = job.kept["probes"]
        if each:
            return probe_values(modules[0], rows)
        parts = [
            probe_values(module, rows[entry.first : entry.first + entry.num_rows])
            for module, entry in zip(modules, job.entries)
        ]
        return {"values": torch.cat([part["values"] for part in parts])}

    def _custom_values(self, job: Job, rows: torch.Tensor, result: JobResult) -> Arrays:
        found: Arrays = {}
        # Functions are told true positions: with drafts this may wait for the device.
        late = self.view.settled().num_computed - self.view.num_computed
        shifts = dict(zip(self.view.req_ids, late.tolist()))
        for number, entry in enumerate(job.entries):
            own = rows[entry.first : entry.first + entry.num_rows]
            own = own.view(entry.count, len(entry.readout.taps), -1)
            request, shift = self._requests[entry.req_id], shifts[entry.req_id]
            values = self._custom.compute(entry, result.shift + shift, own, request)
            if isinstance(values, str):
                result.errors[number] = values
            else:
                found[str(number)] = values
        return found


def translated(
    job: Job, rows: torch.Tensor, translator: TranslatorModule
) -> torch.Tensor:
    """Apply to each of the rows `[R, hidden_size]` the linear map of its layer."""
    if "layers" not in job.kept:
        job.kept["layers"] = _rows_by_layer(job, rows.device)
    out = torch.empty_like(rows)
    for layer, index in job.kept["layers"].items():
        own = rows[index]
        mapped = own @ translator.weights[layer].T
        if layer in translator.biases:
            mapped = mapped + translator.biases[layer]
        out[index] = own + mapped if translator.residual else mapped
    return out


def _rows_by_layer(job: Job, device: torch.device) -> dict[int, torch.Tensor]:
    found: dict[int, list[int]] = {}
    for entry in job.entries:
        taps = entry.readout.taps
        for number in range(entry.num_rows):
            layer = taps[number % len(taps)][0]
            found.setdefault(layer, []).append(entry.first + number)
    return {layer: torch.tensor(rows).to(device) for layer, rows in found.items()}


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
    asked = attrgetter("readout.taps", "readout.after", "readout.alone")
    for _, alike in groupby(job.entries, asked):
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


def _taps_before(readout: Readout) -> np.ndarray:
    """For each staged tap, the index of the one at the previous layer, or -1."""
    staged, is_behind = readout.staged, readout.after >= 0
    taps = [in_front(tap) for tap in staged] if is_behind else staged
    place = {tap: number for number, tap in enumerate(taps)}
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
