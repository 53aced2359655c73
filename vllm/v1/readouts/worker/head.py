# SPDX-License-Identifier: Apache-2.0
"""The model's final norm and unembedding, applied to rows of any layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm import ir
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.residual.tap import num_streams
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.readouts.worker.lens_graphs import MOST_ROWS, Compute, LensGraphs
from vllm.v1.readouts.worker.top_tokens import best_of

NORMS = (
    "norm",
    "norm_f",
    "ln_f",
    "final_layernorm",
    "final_layer_norm",
    "final_norm",
    "ln_out",
    "norm_out",
    "layer_norm",
)
"""Attribute names of the final norm on the module that has the list of layers."""

ELSEWHERE = "the last layer is in another pipeline stage"
"""Refusal of a head that another process has."""

LOGIT_BYTES = 192 << 20
"""Bytes of float32 logits that are held at a time."""
CPU_LOGIT_BYTES = 24 << 20
"""The same on a CPU.

The allocator returns blocks above 32 MiB to the system. More logits would therefore be
in fresh pages in each step, whose clearing takes as long as the product itself.
"""


class RowAdapters:
    """LoRA adapters of given rows, in place of upstream's `punica_wrapper`.

    Upstream's has the adapters of the rows that the step samples from.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        """Take the slot of each row's adapter; -1 for the model without one."""
        self._slots = slots

    def add_lora_logits(
        self,
        logits: torch.Tensor,  # [n, vocabulary], with or without padding
        rows: torch.Tensor,  # [n, hidden_size]
        lora_a: torch.Tensor,  # [slots, 1, rank, hidden_size]
        lora_b: torch.Tensor,  # [slots, 1, vocabulary, rank]
        scale: float,
    ) -> torch.Tensor:
        """Add to the logits of each row what its adapter changes, in place."""
        for slot in set(self._slots) - {-1}:
            own = [n for n, one in enumerate(self._slots) if one == slot]
            index = torch.tensor(own).to(rows.device)
            down, up = lora_a[slot, 0].float(), lora_b[slot, 0].float()
            change = scale * (rows[index].float() @ down.T) @ up.T
            width = change.shape[1]
            logits[index, :width] += change.to(logits.dtype)
        return logits


class Shard:
    """The part of the vocabulary whose logits a tensor-parallel rank computes.

    What is gathered of a row is then some numbers instead of all logits. On two H100s
    (8B, 32,000 tokens) a lens of 32 layers for eight of 32 requests had 0.918, 0.937
    and 0.931 of the plain step's throughput with all logits gathered and the final norm
    in ten operations, and has 0.937, 0.940 and 0.950.
    """

    def __init__(self, processor: LogitsProcessor, embedding: Any) -> None:
        """Take the rank's part of an unembedding.

        Args:
            processor: computes the logits.
            embedding: the unembedding, without adapters.

        """
        self._processor = processor
        self._embedding = embedding
        own = embedding.shard_indices
        self.first: int = own.org_vocab_start_index
        """The rank's first token."""
        self._count: int = own.org_vocab_end_index - self.first
        size = embedding.num_embeddings_per_partition
        self.least: int = embedding.org_vocab_size - (embedding.tp_size - 1) * size
        """Tokens of the rank that has the fewest."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits `[n, tokens of this rank]` of rows after the final norm."""
        bias = getattr(self._embedding, "bias", None)
        found = self._processor(self._embedding, rows, bias, skip_gather=True)
        return found[:, : self._count]

    @classmethod
    def of(
        cls,
        model: Any,
        processors: Sequence[LogitsProcessor],
        embedding: Any,
        rows: torch.Tensor,
    ) -> "Shard | None":
        """This rank's shard; None if the model's logits are not those of the shards.

        A collective. A model may change its logits after they were gathered, so that
        those of some rows are compared.

        Args:
            model: the loaded model.
            processors: its modules that compute logits.
            embedding: its unembedding.
            rows: `[0, hidden_size]`, of the dtype and on the device of the stream.

        """
        some = trial_rows(2, rows.shape[1], rows.dtype, rows.device)
        shard = None
        try:
            whole = model.compute_logits(some)
            shard = cls(processors[-1], embedding)
            own = whole[:, shard.first : shard.first + shard._count]
            is_same = shard.least > 0 and own.equal(shard.logits(some))
        except Exception:
            is_same = False
        # Of a dtype that ranks on CPUs can gather.
        flags = torch.tensor([is_same], dtype=torch.float32, device=rows.device)
        every = get_tp_group().all_gather(flags, dim=0)
        return shard if every.all() else None


class Head:
    """Final norm, unembedding and everything that the model does to its logits.

    Uses the model's `compute_logits`, so vocabulary shards, bias, scale, soft cap and
    quantised weights are handled by the model. A row gets the head with the LoRA
    adapter of its request, which must be loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        last_layer: nn.Module | None,
        vocab_size: int,
        rows: torch.Tensor,
        has_adapters: bool = False,
        shared: bool = False,
        records: bool = False,
    ) -> None:
        """Find the final norm.

        Args:
            model: the loaded model.
            last_layer: a module of the last decoder block; None if that block is in
                another process.
            vocab_size: of the model, over all ranks.
            rows: `[0, hidden_size]`, of the dtype and on the device of the stream.
            has_adapters: whether the engine may load LoRA adapters.
            shared: whether several tensor-parallel ranks have the head.
            records: whether CUDA graphs may be recorded.

        """
        self.has_adapters = has_adapters
        # Equal on all ranks, which must call `compute_logits` equally often.
        held = LOGIT_BYTES if rows.is_cuda else CPU_LOGIT_BYTES
        self.rows_at_once = max(held // (4 * vocab_size), 1)
        self.refusal = ""
        """Why a lens is not possible; empty if it is."""
        self.keeps_logits = True
        """False on ranks that only take part in gathering them."""
        self._model: Any = model
        self.norm: Any = None
        self.divisor = 1.0
        self._received: torch.Tensor | None = None
        """With several ranks: memory for rows of rank 0, which cannot be missing then.
        """
        self._shard: Shard | None = None
        """With several ranks: this one's part of the vocabulary, if it can be used."""
        self._recorded: Compute = self._from_shards if shared else self._alone
        """What is computed of rows without adapters, by CUDA graphs if they may be."""
        if last_layer is None:
            self.refusal = ELSEWHERE
            return
        if shared:
            self._received = rows.new_empty(self.rows_at_once, rows.shape[1])
        self._processors: list[Any] = [
            one for one in model.modules() if isinstance(one, LogitsProcessor)
        ]
        owner = _owner(model, last_layer)
        norms = [] if owner is None else _norms(owner)
        if not callable(getattr(model, "compute_logits", None)):
            self.refusal = "the model's head returns no logits"
        elif num_streams(last_layer):
            self.refusal = (
                "the residual is several streams, which the model joins before its "
                "final norm; capture streams_post"
            )
        elif len(norms) != 1:
            self.refusal = (
                f"of {type(owner).__name__} it is not known which norm comes before "
                f"the unembedding: it has {[name for name, _ in norms]}"
            )
        elif getattr(owner, "project_out", None) is not None:
            self.refusal = "the rows are projected to another width before the head"
        else:
            if rows.is_cuda:  # The kernel is compiled now, not in a step.
                best_of(rows.new_zeros(1, vocab_size), 1, ())
            self.norm = norms[0][1]
            for module in model.modules():  # MiniCPM divides before its head.
                self.divisor = float(getattr(module, "scale_width", self.divisor))
            if self._received is not None and not has_adapters:
                self._shard = Shard.of(model, self._processors, self._unadapted, rows)
            if records and rows.is_cuda and not has_adapters:
                read = self._received
                if read is None:
                    most = min(MOST_ROWS, self.rows_at_once)
                    read = rows.new_empty(most, rows.shape[1])
                self._recorded = LensGraphs(self._recorded, read[:MOST_ROWS])

    def lens_values(
        self,
        rows: torch.Tensor,
        top_k: int,
        tokens: tuple[int, ...],
        adapters: Sequence[int] | None = None,
        error: Exception | None = None,
    ) -> torch.Tensor | None:
        """What `lens_arrays` makes the values of a lens of.

        A collective under tensor parallelism: all ranks must call it. Memory for logits
        is limited: rows are taken in batches.

        A rank that fails takes part all the same, with NaN as its rows or its share of
        the logits, which makes all log-probabilities of these rows NaN, and that an
        error of the readout. To agree on errors first, the ranks' hosts would have to
        meet in each such step.

        Args:
            rows: `[R, hidden_size]`; only the number counts on ranks that have none.
            top_k: number of tokens.
            tokens: ids below the vocabulary's size.
            adapters: the number of each row's adapter; None if there are none.
            error: why this rank has no rows, to be raised.

        Returns:
            `[ranks, R, numbers]` float32; None on a rank that keeps no logits.

        """
        parts = []
        for start in range(0, len(rows), self.rows_at_once):
            span = slice(start, start + self.rows_at_once)
            own = adapters and adapters[span]
            try:
                found = self._best(rows[span], top_k, tokens, own, error)
                if found is not None:
                    parts.append(found)
            except Exception as raised:  # The other ranks would wait with further rows.
                error = raised
        if error is not None:
            raise error
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.cat(parts, dim=1)

    def _best(
        self,
        rows: torch.Tensor,
        top_k: int,
        tokens: tuple[int, ...],
        adapters: Sequence[int] | None,
        error: Exception | None,
    ) -> torch.Tensor | None:
        """As `lens_values`, of at most `rows_at_once` rows."""
        if self._received is None:
            if error is not None:
                raise error
            if self.has_adapters:
                return self._alone(rows, top_k, tokens, adapters)
            return self._recorded(rows, top_k, tokens)
        sent = self._received[: len(rows)]
        if error is not None and self.keeps_logits:
            sent.fill_(math.nan)
        elif self.keeps_logits:
            sent = rows
        if self._shard is not None and top_k <= self._shard.least:
            best = self._recorded(sent, top_k, tokens)
            if error is not None:
                raise error
            return best if self.keeps_logits else None
        _broadcast(sent)
        whole = self._gathered(sent, adapters, error)
        return None if whole is None else best_of(whole, top_k, tokens)[None]

    def _alone(
        self,
        rows: torch.Tensor,
        top_k: int,
        tokens: tuple[int, ...],
        adapters: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """What `best_of` finds in all logits of rows, with one rank."""
        logits: Any = self.logits(rows, adapters)
        return best_of(logits, top_k, tokens)[None]

    def _from_shards(
        self, rows: torch.Tensor, top_k: int, tokens: tuple[int, ...]
    ) -> torch.Tensor:
        """What `best_of` finds in each rank's logits of rank 0's rows."""
        shard = self._shard
        error: Exception | None = None
        assert shard is not None, "all logits are gathered without shards"
        _broadcast(rows)
        try:
            own = shard.logits(self._normed(rows))
            best = best_of(own, top_k, tokens, shard.first)
        except Exception as raised:
            error = raised
            width = 2 * top_k + len(tokens) + 1
            best = rows.new_full((len(rows), width), math.nan, dtype=torch.float32)
        of_ranks = get_tp_group().all_gather(best, dim=0)
        if error is not None:
            raise error
        return of_ranks.unflatten(0, (-1, len(rows)))

    def _gathered(
        self,
        rows: torch.Tensor,
        adapters: Sequence[int] | None,
        error: Exception | None,
    ) -> torch.Tensor | None:
        """The logits of rows that each rank has; collective, as `best`."""
        gathered: list[bool] = []
        try:
            with self._seeing(gathered):
                if error is not None:
                    raise error
                return self.logits(rows, adapters)
        except Exception:
            if not gathered:
                self._gather_nothing(rows)
            raise

    def _gather_nothing(self, rows: torch.Tensor) -> None:
        """Take part in gathering the logits of rows with NaN."""
        gathers = self._processors[-1]
        width = self._unadapted.num_embeddings_per_partition
        dtype = getattr(gathers, "head_dtype", None) or rows.dtype
        nothing = rows.new_full((len(rows), width), math.nan, dtype=dtype)
        gathers._gather_logits(nothing)

    def no_rows(self, count: int) -> torch.Tensor:
        """What stands for rows that this rank does not have, without memory."""
        assert self._received is not None, (
            "rows are missing though only one rank has them"
        )
        return self._received[:1].expand(count, -1)

    @contextmanager
    def _seeing(self, gathered: list[bool]) -> Iterator[None]:
        """Append to `gathered` when the head gathers the logits of all ranks."""
        for one in self._processors:
            gather = one._gather_logits

            def gathers(
                logits: torch.Tensor,
                gather: Callable[[torch.Tensor], torch.Tensor] = gather,
            ) -> torch.Tensor:
                gathered.append(True)
                return gather(logits)

            one._gather_logits = gathers
        try:
            yield
        finally:
            for one in self._processors:
                del one._gather_logits  # The class has the method.

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """What the final norm makes of rows `[n, hidden_size]`."""
        with ir.ops.rms_norm.set_priority(["vllm_c", "native"]):
            normed = self.norm(rows)
        found: torch.Tensor = normed[0] if isinstance(normed, tuple) else normed
        return found

    def logits(
        self, rows: torch.Tensor, adapters: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Logits `[n, vocab_size]` of rows; None on a rank that gets none.

        Without `adapters` they are those of the model without any.
        """
        with self._with(adapters or [0] * len(rows)):
            found: torch.Tensor | None = self._model.compute_logits(self._normed(rows))
        return found

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        """The input of the unembedding."""
        normed = self.normed(rows)
        return normed if self.divisor == 1.0 else normed / self.divisor

    @contextmanager
    def _with(self, adapters: Sequence[int]) -> Iterator[None]:
        """Let the head use these adapters, one for each row."""
        if not self.has_adapters:
            yield
            return
        slots = self._model.lora_manager.lora_index_to_id
        of_rows = RowAdapters([slots.index(one) if one else -1 for one in adapters])
        adapted = [
            one for one in self._model.modules() if hasattr(one, "lora_b_stacked")
        ]
        heads = [one for one in adapted if hasattr(one, "logits_as_input")]
        before = [one.punica_wrapper for one in heads]
        for one in heads:
            one.punica_wrapper = of_rows
        try:
            yield
        finally:
            for one, wrapper in zip(heads, before, strict=True):
                one.punica_wrapper = wrapper

    @property
    def _unadapted(self) -> Any:
        """The unembedding without adapters: Gemma uses its embeddings."""
        whole = model = self._model
        if hasattr(model, "get_language_model"):
            model = model.get_language_model()
        inner = getattr(model, "model", None)
        # The language model of an encoder-decoder is its decoder, without a head.
        places = (
            *((model, "lm_head"), (whole, "lm_head"), (whole, "proj_out")),
            (inner, "embed_tokens"),
        )
        found = (getattr(owner, name, None) for owner, name in places)
        head = next((one for one in found if one is not None), None)
        return getattr(head, "base_layer", head)

    def unembedding(
        self, tokens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and biases of the unembedding, and which of them this rank has.

        Args:
            tokens: ids below the vocabulary's size.

        Returns:
            `[tokens, hidden_size]` and `[tokens]` in the weights' dtype, zeros where
            another rank has them, and booleans `[tokens]`.

        Raises:
            ValueError: the weights are not kept as they are.

        """
        head = self._unadapted
        weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
        if weight is None or not weight.dtype.is_floating_point:
            raise ValueError("the model has no unembedding with floating-point rows")
        shard = getattr(head, "shard_indices", None)
        ids = torch.tensor(tokens, device=weight.device)
        first = shard.org_vocab_start_index if shard is not None else 0
        end = shard.org_vocab_end_index if shard is not None else len(weight)
        own = (ids >= first) & (ids < end)
        at = torch.where(own, ids - first, 0)
        rows = torch.where(own[:, None], weight[at], 0)
        biases = rows.new_zeros(len(ids)) if bias is None else bias[at].where(own, 0)
        return rows, biases, own


def trial_rows(
    count: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows to compare computations by; their mean is as large as their deviation."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(count, width, generator=draw) + 1
    return (10 * rows).to(device, dtype)


def final_norm_of(model: nn.Module, last_layer: nn.Module) -> nn.Module | None:
    """The norm between the last decoder layer and the unembedding, if it is known."""
    owner = _owner(model, last_layer)
    norms = [] if owner is None else _norms(owner)
    return norms[0][1] if len(norms) == 1 else None


def _owner(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The module that has the list of layers, and so also the final norm."""
    for module in model.modules():  # Parents come before their children.
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(
                layer is part for one in child for part in one.modules()
            ):
                return module
    return None


def _norms(owner: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, child)
        for name, child in owner.named_children()
        if name in NORMS and not isinstance(child, PPMissingLayer)
    ]


def _broadcast(rows: torch.Tensor) -> None:
    """Send rank 0's rows to the other tensor-parallel ranks.

    On the stream and with the communicator of the pass, where `GroupCoordinator` has
    others.
    """
    group: Any = get_tp_group()
    communicator = group.device_communicator
    nccl = getattr(communicator, "pynccl_comm", None)
    usable = communicator is not None and not getattr(nccl, "disabled", False)
    (communicator if usable else group).broadcast(rows, src=0)
