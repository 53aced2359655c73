# SPDX-License-Identifier: Apache-2.0
"""Attention patterns, computed after the pass from staged queries and cached keys.

Without this a user captures `q` and `k` of every token and multiplies on the host: the
keys of a layer of an 8B model are 2 KiB for each token of the context, where 8 weights
and positions a head come back here.

Legend: l layers, h heads, r rows (query tokens), c keys of the request. The rows of a
job are as in `operations.py`; rows of `q` that are wider than the stream take several.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readouts.worker.agreement import failing_together
from vllm.v1.readouts.worker.jobs import Arrays, Entry, Job
from vllm.v1.readouts.worker.key_cache import KeyCache, why_unread
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


class Alike(NamedTuple):
    """Layers with heads and keys of one kind: one product serves all of them."""

    places: list[int]
    """Which of the readout's layers they are."""
    cores: list[Any]
    """Upstream's attention layers."""
    queries: torch.Tensor  # [l, heads, r, head_size], float32; this rank's heads


class Tokens(NamedTuple):
    """The tokens of an entry, and the keys that are there for them."""

    table: torch.Tensor
    """The blocks of the request."""
    first: torch.Tensor
    """Position of the first token, a scalar on the device."""
    context: int
    """How many keys there are."""


Part: TypeAlias = tuple[Alike, Tokens]
"""Some layers of an entry."""


class AttentionPatterns:
    """Computes patterns of a worker's layers. Engine thread only.

    Works on the stream of the forward pass: the next step may write other keys into
    the blocks. Each tensor-parallel rank computes those of its heads.
    """

    def __init__(
        self,
        cores: Mapping[int, Any],
        width: int,
        device: torch.device,
        knows_positions: bool = True,
    ) -> None:
        """Note the layers.

        Args:
            cores: upstream's attention layers with the point `q`, by layer.
            width: of the stream.
            device: of the model.
            knows_positions: whether the host knows where tokens are when a step
                begins, which with draft tokens only the device does.

        """
        self._knows_positions = knows_positions
        self._cores = cores
        self._width = width
        self._device = device
        self._keys = KeyCache()
        self._rank, self._ranks = 0, 1
        if cores:
            group = get_tp_group()
            self._rank, self._ranks = group.rank_in_group, group.world_size
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
        """The patterns of a job's entries. A collective under tensor parallelism.

        Args:
            job: of readouts of this kind.
            rows: `[R, hidden_size]`, the staged queries.
            starts: the position of each request's first token in the step, in the
                counting of the entries.
            further: is added to the positions of the entries.

        Returns:
            For entry i `i.weights` `[count, taps, h, k]` float32 and `i.keys` int32, of
            the `top_k` keys with the largest weights, or only weights of given keys;
            `[count, h, c]`, on the host, of all keys. Of entries with one token and
            alike otherwise `all.weights` and `all.keys`, `[entries, taps, h, k]`.

        """
        self._reserved = None
        batch = {req_id: row for row, req_id in enumerate(self._req_ids)}
        if self._are_tokens(job):
            tokens = self._of_tokens(job, rows, batch, further)
            if tokens is not None:
                return {f"all.{label}": one for label, one in tokens.items()}
        own: list[Any] = []
        compute = self._of_entry if self._ranks == 1 else self._of_rank
        with failing_together():
            for entry in job.entries:
                queries = rows[entry.first : entry.first + entry.num_rows]
                row, offset = batch[entry.req_id], entry.start - starts[entry.req_id]
                context = entry.start + further + entry.count
                parts = [
                    (alike, self._tokens(alike.cores[0], row, offset, context))
                    for alike in self._alike(entry, queries.view(entry.count, -1))
                ]
                own.append(compute(job, entry, parts))
        if self._ranks > 1:
            own = [get_tp_group().all_reduce(one) for one in own]
        found: Arrays = {}
        for number, (entry, one) in enumerate(zip(job.entries, own, strict=True)):
            arrays = one if self._ranks == 1 else _arrays_of(entry.readout, one)
            if entry.readout.full:
                arrays = {label: one[:, 0] for label, one in arrays.items()}
            found.update({f"{number}.{label}": one for label, one in arrays.items()})
        return found

    def _are_tokens(self, job: Job) -> bool:
        """Whether a job, whose entries read alike, reads one token of each."""
        if self._ranks > 1 or not self._knows_positions:
            return False
        return not any(one.count > 1 or one.readout.full for one in job.entries)

    def _of_tokens(
        self, job: Job, rows: torch.Tensor, batch: Mapping[str, int], further: int
    ) -> Arrays | None:
        """Patterns `[entries, taps, h, ...]` of one token of each request, at once.

        Whatever the host knows needs no operation: a layer of one request takes 14 and
        of eight requests 17, where `_of_entry` takes 27 and 202. None where the keys do
        not fit.
        """
        entries, kept = job.entries, job.kept
        readout, count = entries[0].readout, len(entries)
        contexts = [one.start + further + 1 for one in entries]
        heads = _on_device(kept, readout.heads, self._device)
        keys = _on_device(kept, readout.keys, self._device) if readout.keys else None
        at = tuple(batch[one.req_id] for one in entries)
        parts: list[Arrays] = []
        places: list[int] = []
        for alike in self._alike(entries[0], rows.view(count, -1)):
            core, longest = alike.cores[0], max(contexts)
            numbers = len(alike.cores) * len(heads) * longest * core.head_size
            most = self._held // (4 * numbers)
            if not most:
                return None
            queries = alike.queries
            if readout.heads != tuple(range(core.num_heads)):
                queries = queries.index_select(1, heads)
            pieces: list[Arrays] = []
            for some in _pieces(count, most):
                own = contexts[some]
                scores = self._token_scores(
                    job, alike.cores, queries[:, :, some], at[some], max(own)
                )
                behind = hidden = None
                if len(set(own)) > 1 or _looks_back(core):
                    first = tuple(one.start for one in entries[some])
                    last = _on_device(kept, first, self._device) + further
                    behind = last[:, None] - torch.arange(max(own), device=self._device)
                    hidden = _hidden(core, behind)
                weights = _softmax(alike.cores, scores, heads, behind, hidden)
                pieces.append(_chosen(readout, weights, hidden, keys))
            parts.append(_joined(pieces, dim=0))
            places += alike.places
        return self._in_order(job, _joined(parts, dim=1), places)

    def _token_scores(
        self,
        job: Job,
        cores: Sequence[Any],
        queries: torch.Tensor,  # [l, h, entries, head_size]
        at: tuple[int, ...],
        context: int,
    ) -> torch.Tensor:
        """Scaled products of a token of each request with its keys, `[l, h, r, c]`.

        Args:
            job: with the readouts.
            cores: the layers.
            queries: of the tokens.
            at: where the requests are in the batch.
            context: how many keys the longest request has.

        """
        core, kept = cores[0], job.kept
        block, size = core.kv_cache.shape[2], core.head_size
        table = self._metadata[core.layer_name].block_table[:, : -(-context // block)]
        if len(at) == 1:
            blocks = table[at[0]]
        else:  # Past a request's end there may be anything.
            rows = _on_device(kept, at, self._device)
            blocks = table.index_select(0, rows).clamp_(min=0).flatten()
        group = core.num_heads // core.num_kv_heads
        own = tuple(head // group for head in job.entries[0].readout.heads)
        keys = self._keys.read(cores, blocks, _on_device(kept, own, self._device))
        keys = keys.view(-1, len(blocks) // len(at) * block, size)
        flat = (queries * core.impl.scale).reshape(-1, 1, size)
        scores = torch.bmm(flat, keys.transpose(1, 2))
        return scores.view(*queries.shape[:3], -1)[..., :context]

    def _alike(self, entry: Entry, rows: torch.Tensor) -> Iterator[Alike]:
        """An entry's layers, by kind, with the queries of its `rows` `[r, numbers]`."""
        kinds: dict[tuple[Any, ...], list[tuple[int, Any, torch.Tensor]]] = {}
        at = 0
        for place, (layer, _) in enumerate(entry.readout.taps):
            core = self._cores[layer]
            here = core.num_heads * core.head_size
            own = self._queries(core, rows[:, at + self._rank * here :][:, :here])
            at += self._width * -(-here * self._ranks // self._width)
            kinds.setdefault(self._kind(core), []).append((place, core, own))
        for found in kinds.values():
            places, cores, queries = map(list, zip(*found))
            wide = torch.stack(queries) if len(queries) > 1 else queries[0][None]
            wide = wide.unflatten(-1, (-1, cores[0].head_size))
            yield Alike(places, cores, wide.transpose(1, 2))

    def _queries(self, core: Any, rows: torch.Tensor) -> torch.Tensor:
        """Queries as attention reads them, float32."""
        if core.query_quant is None:
            return rows.float()
        rounded, _ = core.query_quant(rows.contiguous(), core._q_scale)
        return rounded.float() * core._q_scale

    def _kind(self, core: Any) -> tuple[Any, ...]:
        """What layers have in common that are computed together."""
        impl = core.impl
        return (
            core.num_heads,
            core.num_kv_heads,
            core.head_size,
            core.kv_cache.shape[2],
            core.sliding_window,
            impl.scale,
            impl.logits_soft_cap,
            getattr(impl, "sinks", None) is None,
            impl.alibi_slopes is None,
            id(self._metadata[core.layer_name].block_table),
        )

    def _tokens(self, core: Any, row: int, offset: int, context: int) -> Tokens:
        metadata = self._metadata[core.layer_name]
        starts = metadata.query_start_loc
        first = metadata.seq_lens[row] - starts[row + 1] + starts[row] + offset
        return Tokens(metadata.block_table[row], first, context)

    def _of_entry(self, job: Job, entry: Entry, parts: Sequence[Part]) -> Arrays:
        """The patterns `[count, taps, h, ...]` of an entry, of all its heads."""
        heads = entry.readout.heads
        arrays = _joined([self._of_heads(job, entry, *p, heads) for p in parts], dim=1)
        places = [place for alike, _ in parts for place in alike.places]
        return self._in_order(job, arrays, places)

    def _in_order(self, job: Job, arrays: Arrays, places: Sequence[int]) -> Arrays:
        """Arrays whose taps are at these places, in the order of the readout's."""
        if places == sorted(places):
            return arrays
        back = _on_device(job.kept, tuple(np.argsort(places)), self._device)
        return {label: one[:, back] for label, one in arrays.items()}

    def _of_rank(self, job: Job, entry: Entry, parts: Sequence[Part]) -> torch.Tensor:
        """`[labels, count, taps, h, k]` float32, 0 where other ranks have the head."""
        readout = entry.readout
        labels, heads = _labels(readout), readout.heads
        size = len(readout.keys) or readout.top_k or parts[0][1].context
        shape = len(labels), entry.count, len(readout.taps), len(heads), size
        whole = torch.zeros(shape, device=self._device)
        for alike, tokens in parts:
            count = alike.cores[0].num_heads
            own = [n for n, head in enumerate(heads) if head // count == self._rank]
            if not own:
                continue
            here = tuple(heads[n] % count for n in own)
            part = self._of_heads(job, entry, alike, tokens, here)
            for arrays, label in zip(whole, labels):
                values = part[label].to(self._device)
                for number, place in enumerate(alike.places):
                    # A float32 holds every position of a token.
                    arrays[:, place, own] = values[:, number].float()
        return whole

    def _of_heads(
        self,
        job: Job,
        entry: Entry,
        alike: Alike,
        tokens: Tokens,
        chosen: tuple[int, ...],
    ) -> Arrays:
        """Patterns `[count, l, h, ...]` of some heads, computed piece by piece."""
        readout, kept, context = entry.readout, job.kept, tokens.context
        heads = _on_device(kept, chosen, self._device)
        keys = _on_device(kept, readout.keys, self._device) if readout.keys else None
        full = None
        if readout.full:
            pinned = self._device.type == "cuda"
            full = torch.empty(entry.count, 1, len(chosen), context, pin_memory=pinned)
        places = torch.arange(context, device=self._device)
        bound = max(self._held // (4 * context), 1)  # Rows of all heads.
        # Where all rows fit, the fewest operations; else each key is read least often.
        together = max(bound // (len(chosen) * entry.count), 1)
        parts: list[Arrays] = []
        for layers in _pieces(len(alike.cores), together):
            columns: list[Arrays] = []
            cores, each = alike.cores[layers], len(alike.cores[layers])
            for some in _pieces(len(chosen), max(bound // each, 1)):
                pieces: list[Arrays] = []
                size = max(bound // (each * (some.stop - some.start)), 1)
                for rows in _pieces(entry.count, size):
                    own = torch.arange(rows.start, rows.stop, device=self._device)
                    behind = (tokens.first + own)[:, None] - places
                    hidden = _hidden(cores[0], behind)
                    queries = alike.queries[layers, heads[some], rows]
                    scores = self._scores(cores, queries, heads[some], tokens)
                    weights = _softmax(cores, scores, heads[some], behind, hidden)
                    if full is not None:
                        full[rows, :, some].copy_(
                            weights.permute(2, 0, 1, 3), non_blocking=True
                        )
                    else:
                        pieces.append(_chosen(readout, weights, hidden, keys))
                if pieces:
                    columns.append(_joined(pieces, dim=0))
            if columns:
                parts.append(_joined(columns, dim=2))
        return {"weights": full} if full is not None else _joined(parts, dim=1)

    def _scores(
        self,
        cores: Sequence[Any],
        queries: torch.Tensor,  # [l, h, r, head_size]
        heads: torch.Tensor,  # [h]
        tokens: Tokens,
    ) -> torch.Tensor:
        """Scaled products of queries and keys, `[l, h, r, c]`."""
        core = cores[0]
        block, context = core.kv_cache.shape[2], tokens.context
        kv_heads = heads // (core.num_heads // core.num_kv_heads)
        flat = queries.flatten(0, 1) * core.impl.scale
        each = 4 * len(flat) * block * core.head_size
        products = []
        for part in _pieces(-(-context // block), max(self._held // each, 1)):
            keys = self._keys.read(cores, tokens.table[part], kv_heads)
            products.append(torch.bmm(flat, keys.transpose(1, 2)))
        scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return scores[..., :context].view(*queries.shape[:3], -1)


def _labels(readout: Readout) -> tuple[str, ...]:
    return ("weights", "keys") if readout.top_k else ("weights",)


def _arrays_of(readout: Readout, whole: torch.Tensor) -> Arrays:
    """The arrays of `AttentionPatterns._of_rank`, summed over ranks."""
    found = dict(zip(_labels(readout), whole))
    return {k: one.int() if k == "keys" else one for k, one in found.items()}


def asked(readout: Readout) -> tuple[Any, ...]:
    """What a readout asks of each of its tokens."""
    one = readout
    return one.taps, one.heads, one.top_k, one.keys, one.full


def _looks_back(core: Any) -> bool:
    """Whether it depends on the distance of a key how much attention reads of it."""
    return core.sliding_window is not None or core.impl.alibi_slopes is not None


def _hidden(core: Any, behind: torch.Tensor) -> torch.Tensor:
    """Whether attention does not read keys that are `behind` the query, `[r, c]`."""
    hidden = behind < 0
    if core.sliding_window is not None:
        hidden |= behind >= core.sliding_window
    return hidden


def _softmax(
    cores: Sequence[Any],
    scores: torch.Tensor,  # [l, h, r, c], overwritten
    heads: torch.Tensor,
    behind: torch.Tensor | None,  # [r, c]
    hidden: torch.Tensor | None,  # [r, c]; None: nothing is
) -> torch.Tensor:
    """The weights of the keys, `[l, h, r, c]`; with a sink their sum is below 1."""
    impl = cores[0].impl
    if impl.logits_soft_cap:
        scores.div_(impl.logits_soft_cap).tanh_().mul_(impl.logits_soft_cap)
    if impl.alibi_slopes is not None and behind is not None:
        slopes = _stacked(cores, "alibi_slopes", heads)
        scores -= slopes * behind
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    if getattr(impl, "sinks", None) is None:
        return scores.softmax(dim=-1)
    sinks = _stacked(cores, "sinks", heads).expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _stacked(cores: Sequence[Any], name: str, heads: torch.Tensor) -> torch.Tensor:
    """One number of each head of some layers, `[l, h, 1, 1]` float32."""
    numbers = [getattr(core.impl, name).to(heads.device)[heads] for core in cores]
    return torch.stack(numbers).float()[:, :, None, None]


def _chosen(
    readout: Readout,
    weights: torch.Tensor,  # [l, h, r, c]
    hidden: torch.Tensor | None,  # [r, c]
    keys: torch.Tensor | None,
) -> Arrays:
    """The weights `[r, l, h, k]` of the wanted keys, and which these are."""
    weights = weights.permute(2, 0, 1, 3)
    context = weights.shape[-1]
    if keys is not None:
        some = weights[..., keys.clamp(max=context - 1)]
        return {"weights": some.masked_fill(keys >= context, 0.0)}
    count = min(readout.top_k, context)
    largest, where = weights.topk(count, dim=-1)
    chosen = where.int()
    if hidden is not None:
        unseen = hidden[:, None, None].expand_as(weights).gather(-1, where)
        chosen.masked_fill_(unseen, -1)
    if missing := readout.top_k - count:
        largest = torch.nn.functional.pad(largest, (0, missing))
        chosen = torch.nn.functional.pad(chosen, (0, missing), value=-1)
    return {"weights": largest, "keys": chosen}


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
