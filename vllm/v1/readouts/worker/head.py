# SPDX-License-Identifier: Apache-2.0
"""The model's final norm and unembedding, applied to rows of any layer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.readouts.worker.kinds import Arrays

NORMS = (
    "norm",
    "norm_f",
    "ln_f",
    "final_layernorm",
    "final_layer_norm",
    "final_norm",
    "ln_out",
    "norm_out",
)
"""Attribute names of the final norm on the module that has the list of layers."""

ELSEWHERE = "the last layer is in another pipeline stage"
"""Refusal of a head that another process has."""

LOGIT_BYTES = 192 << 20
"""Bytes of float32 logits that are held at a time."""


class Head:
    """Final norm, unembedding and everything that the model does to its logits.

    Uses the model's `compute_logits`, so vocabulary shards, bias, scale, soft cap and
    quantised weights are handled by the model.
    """

    def __init__(
        self, model: nn.Module, last_layer: nn.Module | None, vocab_size: int
    ) -> None:
        """Find the final norm.

        Args:
            model: the loaded model.
            last_layer: a module of the last decoder block; None if that block is in
                another process.
            vocab_size: of the model, over all ranks.

        """
        # Equal on all ranks, which must call `compute_logits` equally often.
        self._rows_at_once = max(LOGIT_BYTES // (4 * vocab_size), 1)
        self.refusal = ""
        """Why a lens is not possible; empty if it is."""
        self._model: Any = model
        self._norm: Any = None
        self._divisor = 1.0
        if last_layer is None:
            self.refusal = ELSEWHERE
            return
        owner = _owner(model, last_layer)
        norms = [] if owner is None else _norms(owner)
        if not callable(getattr(model, "compute_logits", None)):
            self.refusal = "the model's head returns no logits"
        elif len(norms) != 1:
            self.refusal = (
                f"of {type(owner).__name__} it is not known which norm comes before "
                f"the unembedding: it has {[name for name, _ in norms]}"
            )
        elif getattr(owner, "project_out", None) is not None:
            self.refusal = "the rows are projected to another width before the head"
        else:
            self._norm = norms[0][1]
            for module in model.modules():  # MiniCPM divides before its head.
                self._divisor = float(getattr(module, "scale_width", self._divisor))

    def log_probs(self, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Log-probabilities of rows `[n, hidden_size]`, in batches of limited memory.

        A collective under tensor parallelism: all ranks must call it.

        Yields:
            A slice of the rows and their float32 `[rows, vocab_size]`. Nothing on a
            rank that gets no logits.

        """
        for start in range(0, len(rows), self._rows_at_once):
            span = slice(start, min(start + self._rows_at_once, len(rows)))
            logits = self.logits(rows[span])
            if logits is not None:
                yield span, logits.float().log_softmax(dim=-1)

    def logits(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Logits `[n, vocab_size]` of rows; None on a rank that gets none."""
        normed = self._norm(rows)
        if isinstance(normed, tuple):
            normed = normed[0]
        if self._divisor != 1.0:
            normed = normed / self._divisor
        found: torch.Tensor | None = self._model.compute_logits(normed)
        return found

    def unembedding(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the unembedding, and which of them this rank has.

        Args:
            tokens: ids below the vocabulary's size.

        Returns:
            `[tokens, hidden_size]` in the weights' dtype, zeros where another rank has
            the row, and booleans `[tokens]`.

        Raises:
            ValueError: the weights are not kept as they are.

        """
        weight = getattr(getattr(self._model, "lm_head", None), "weight", None)
        if weight is None or not weight.dtype.is_floating_point:
            raise ValueError("the model has no unembedding with floating-point rows")
        shard = getattr(self._model.lm_head, "shard_indices", None)
        ids = torch.tensor(tokens, device=weight.device)
        first = shard.org_vocab_start_index if shard is not None else 0
        end = shard.org_vocab_end_index if shard is not None else len(weight)
        own = (ids >= first) & (ids < end)
        rows = weight[torch.where(own, ids - first, 0)]
        return torch.where(own[:, None], rows, torch.zeros_like(rows)), own


def _owner(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The module that has the list of layers, and so also the final norm."""
    found = None
    for module in model.modules():  # Parents come before their children.
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(
                layer is part for one in child for part in one.modules()
            ):
                return module
    return found


def _norms(owner: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, child)
        for name, child in owner.named_children()
        if name in NORMS and not isinstance(child, PPMissingLayer)
    ]


def lens_values(
    head: Head, rows: torch.Tensor, top_k: int, tokens: tuple[int, ...]
) -> Arrays:
    """The `top_k` most likely tokens of each row, and log-probabilities of `tokens`.

    Returns:
        `token_ids` int32 and `logprobs` float32 `[R, top_k]` if `top_k`, and
        `token_logprobs` float32 `[R, len(tokens)]` if there are `tokens`. Empty on a
        rank that gets no logits.

    """
    wanted = torch.tensor(tokens, device=rows.device) if tokens else None
    ids, best, named = [], [], []
    for _, logs in head.log_probs(rows):
        if top_k:
            top = logs.topk(top_k, dim=-1)
            ids.append(top.indices.to(torch.int32))
            best.append(top.values)
        if wanted is not None:
            named.append(logs[:, wanted])
    found: Arrays = {}
    if ids:
        found |= {"token_ids": torch.cat(ids), "logprobs": torch.cat(best)}
    if named:
        found["token_logprobs"] = torch.cat(named)
    return found
