# SPDX-License-Identifier: Apache-2.0
"""Attention patterns, computed after the pass from staged queries and cached keys.

Without this a user captures `q` and `k` of every token and multiplies on the host: the
keys of a layer of an 8B model are 2 KiB for each token of the context, where 8 weights
and positions a head come back here. One layer read for 1 of 32 requests takes 1.1 ms of
a step (1B class, H100).

Legend: h heads, r rows (query tokens), c keys of the request. The rows of a job are as
in `kinds.py`; rows of `q` that are wider than the stream take several of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readouts.worker.jobs import Entry, Job
from vllm.v1.readouts.worker.key_cache import KeyCache, why_unread
from vllm.v1.readouts.worker.kinds import Arrays
from vllm.v1.residual.readout_plan import Readout

SCORE_BYTES = 64 << 20
"""Bytes of float32 scores that are held at a time, beside as many of keys.

Two to three times this is reserved on a GPU while memory is profiled. One row of one
head is always held.
"""
CPU_SCORE_BYTES = 16 << 20
"""The same on a CPU, as `CPU_LOGIT_BYTES`."""
TIMES = 4
"""Most tensors of scores or keys at the same time."""


class AttentionPatterns:
    """Computes patterns of a worker's layers. Engine thread only.

    Works on the stream of the forward pass: the next step may write other keys into
    the blocks.
    """

    def __init__(
        self, cores: Mapping[int, Any], width: int, device: torch.device
    ) -> None:
        """Note the layers.

        Args:
            cores: upstream's attention layers with the point `q`, by layer.
            width: of the stream.
            device: of the model.

        """
        self._cores = cores
        self._width = width
        self._device = device
        self._keys = KeyCache()
        self._held = CPU_SCORE_BYTES if device.type == "cpu" else SCORE_BYTES
        self._metadata: Any = None
        self._req_ids: Sequence[str] = ()
        # Counted when memory is profiled; given back when patterns are first computed.
        reserves = bool(cores) and device.type != "cpu"
        size = TIMES * self._held if reserves else 0
        self._reserved: Any = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def refusals(self) -> dict[int, str]:
        """Why patterns of a layer with `q` are not computed, for those that are not."""
        found = {layer: why_unread(core) for layer, core in self._cores.items()}
        return {layer: why for layer, why in found.items() if why}

    def begin(self, metadata: Any, req_ids: Sequence[str]) -> None:
        """Take what a step's attention has read.

        Args:
            metadata: upstream's, by name of the attention layer.
            req_ids: the requests, in the order of the batch.

        """
        self._metadata = metadata
        self._req_ids = req_ids

    def compute(
        self, job: Job, rows: torch.Tensor, starts: Mapping[str, int], further: int
    ) -> Arrays:
        """The patterns of a job's entries.

        Args:
            job: of readouts of this kind.
            rows: `[R, hidden_size]`, the staged queries.
            starts: the position of each request's first token in the step, in the
                counting of the entries.
            further: is added to the positions of the entries.

        Returns:
            For entry i `i.weights` `[count, taps, h, k]` float32 and `i.keys` int32, of
            the `top_k` keys with the largest weights, or only weights of given keys;
            `[count, h, c]`, on the host, of all keys.

        """
        self._reserved = None
        batch = {req_id: row for row, req_id in enumerate(self._req_ids)}
        found: Arrays = {}
        for number, entry in enumerate(job.entries):
            own = rows[entry.first : entry.first + entry.num_rows]
            offset = entry.start - starts[entry.req_id]
            parts = [
                self._of_layer(
                    job, entry, core, batch[entry.req_id], queries, offset, further
                )
                for core, queries in self._queries(entry, own.view(entry.count, -1))
            ]
            for label in parts[0]:
                arrays = [part[label] for part in parts]
                whole = arrays[0] if entry.readout.full else torch.stack(arrays, dim=1)
                found[f"{number}.{label}"] = whole
        return found

    def _queries(
        self, entry: Entry, rows: torch.Tensor
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Each layer with its queries `[r, heads, head_size]` float32."""
        at = 0
        for layer, _ in entry.readout.taps:
            core = self._cores[layer]
            numbers = core.num_heads * core.head_size
            queries = rows[:, at : at + numbers]
            at += self._width * -(-numbers // self._width)
            if core.query_quant is None:
                queries = queries.float()
            else:  # Attention reads what is left of them in 8 bits.
                rounded, _ = core.query_quant(queries.contiguous(), core._q_scale)
                queries = rounded.float() * core._q_scale
            yield core, queries.view(-1, core.num_heads, core.head_size)

    def _of_layer(
        self,
        job: Job,
        entry: Entry,
        core: Any,
        row: int,
        queries: torch.Tensor,
        offset: int,
        further: int,
    ) -> Arrays:
        """The patterns `[count, h, ...]` of one layer, computed piece by piece."""
        readout, kept = entry.readout, job.kept
        metadata = self._metadata[core.layer_name]
        table = metadata.block_table[row]
        starts = metadata.query_start_loc
        first = metadata.seq_lens[row] - starts[row + 1] + starts[row] + offset
        context = entry.start + further + entry.count
        heads = _on_device(kept, readout.heads, self._device)
        keys = _on_device(kept, readout.keys, self._device) if readout.keys else None
        full = _full(entry, context, self._device) if readout.full else None
        places = torch.arange(context, device=self._device)
        bound = max(self._held // (4 * context), 1)  # Rows of all heads.
        columns: list[Arrays] = []
        for some in _pieces(len(readout.heads), bound):
            pieces: list[Arrays] = []
            for rows in _pieces(entry.count, max(bound // (some.stop - some.start), 1)):
                own = torch.arange(rows.start, rows.stop, device=self._device)
                behind = (first + own)[:, None] - places
                hidden = _hidden(core, behind)
                scores = self._scores(core, queries[rows], heads[some], table, context)
                weights = _softmax(core, scores, heads[some], behind, hidden)
                if full is not None:
                    full[rows, some].copy_(weights.transpose(0, 1), non_blocking=True)
                else:
                    pieces.append(_chosen(readout, weights, hidden, keys))
            if pieces:
                columns.append(_joined(pieces, dim=0))
        return {"weights": full} if full is not None else _joined(columns, dim=1)

    def _scores(
        self,
        core: Any,
        queries: torch.Tensor,  # [r, heads, head_size]
        heads: torch.Tensor,  # [h]
        table: torch.Tensor,
        context: int,
    ) -> torch.Tensor:
        """Scaled products of queries and keys, `[h, r, c]`."""
        block = core.kv_cache.shape[2]
        queries = queries.index_select(1, heads).transpose(0, 1) * core.impl.scale
        kv_heads = heads // (core.num_heads // core.num_kv_heads)
        scores = queries.new_empty(*queries.shape[:2], context)
        size = 4 * len(heads) * block * core.head_size
        for part in _pieces(-(-context // block), max(self._held // size, 1)):
            keys = self._keys.read(core, table[part], kv_heads)
            start, stop = part.start * block, min(part.stop * block, context)
            products = torch.bmm(queries, keys[:, : stop - start].transpose(1, 2))
            scores[:, :, start:stop] = products
        return scores


def _hidden(core: Any, behind: torch.Tensor) -> torch.Tensor:
    """Whether attention does not read keys that are `behind` the query, `[r, c]`."""
    hidden = behind < 0
    if core.sliding_window is not None:
        hidden |= behind >= core.sliding_window
    return hidden


def _softmax(
    core: Any,
    scores: torch.Tensor,  # [h, r, c], overwritten
    heads: torch.Tensor,
    behind: torch.Tensor,  # [r, c]
    hidden: torch.Tensor,  # [r, c]
) -> torch.Tensor:
    """The weights of the keys, `[h, r, c]`; with a sink their sum is below 1."""
    impl = core.impl
    if impl.logits_soft_cap:
        scores.div_(impl.logits_soft_cap).tanh_().mul_(impl.logits_soft_cap)
    if impl.alibi_slopes is not None:
        slopes = impl.alibi_slopes.to(scores.device)[heads].float()
        scores -= slopes[:, None, None] * behind
    scores.masked_fill_(hidden, -torch.inf)
    most = scores.amax(dim=-1, keepdim=True)
    sinks = getattr(impl, "sinks", None)
    if sinks is not None:
        sink = sinks[heads].float()[:, None, None]
        most = torch.maximum(most, sink)
    scores.sub_(most).exp_()
    total = scores.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += (sink - most).exp()
    return scores.div_(total)


def _chosen(
    readout: Readout,
    weights: torch.Tensor,  # [h, r, c]
    hidden: torch.Tensor,  # [r, c]
    keys: torch.Tensor | None,
) -> Arrays:
    """The weights `[r, h, k]` of the wanted keys, and which these are."""
    context = weights.shape[-1]
    if keys is not None:
        some = weights[..., keys.clamp(max=context - 1)]
        some.masked_fill_(keys >= context, 0.0)
        return {"weights": some.transpose(0, 1)}
    count = min(readout.top_k, context)
    largest, where = weights.topk(count, dim=-1)
    where.masked_fill_(hidden.expand_as(weights).gather(-1, where), -1)
    missing = 0, readout.top_k - count
    return {
        "weights": torch.nn.functional.pad(largest, missing).transpose(0, 1),
        "keys": torch.nn.functional.pad(where.int(), missing, value=-1).transpose(0, 1),
    }


def _full(entry: Entry, context: int, device: torch.device) -> torch.Tensor:
    """`[count, h, c]` on the host."""
    shape = entry.count, len(entry.readout.heads), context
    return torch.empty(*shape, pin_memory=device.type == "cuda")


def _joined(parts: Sequence[Arrays], dim: int) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {label: torch.cat([one[label] for one in parts], dim) for label in parts[0]}


def _pieces(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def _on_device(
    kept: dict[Any, Any], values: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The values on the device, kept for later steps of the same job set."""
    if values not in kept:
        kept[values] = async_tensor_h2d(np.array(values, np.int64), device=device)
    found: torch.Tensor = kept[values]
    return found
