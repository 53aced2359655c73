# SPDX-License-Identifier: Apache-2.0
"""A worker that fails to compute attention patterns or a lens when it is told to."""

from typing import Any

import torch

from vllm.v1.readouts.worker import head, pending, worker
from vllm.v1.readouts.worker.attention import AttentionPatterns

scores = AttentionPatterns._scores
PLACES: dict[str, tuple[Any, str]] = {
    "rows": (worker.WorkerReadouts, "_rows"),
    "norm": (head.Head, "normed"),
    "share": (head, "best_of"),
    "whole": (pending, "lens_arrays"),
}
WHOLE = {name: getattr(*place) for name, place in PLACES.items()}


class Breaking:
    """Used as `worker_extension_cls`."""

    def fail_patterns(self, rank: int | None) -> None:
        """From now on let this rank fail, or none."""
        fails = rank == torch.distributed.get_rank()
        made = failing if fails else scores
        AttentionPatterns._scores = made  # type: ignore[method-assign]

    def gather_logits(self, whole: bool) -> None:
        """From now on let ranks gather whole logits, or no longer."""
        found: Any = self
        found = found.model_runner.residual.readouts.head
        if whole:
            self._shard, found._shard = found._shard, None
        else:
            found._shard = self._shard

    def fail_lens(self, rank: int, place: str, fails: bool) -> None:
        """From now on let this rank fail there, or no longer."""
        if rank == torch.distributed.get_rank():
            setattr(*PLACES[place], failing if fails else WHOLE[place])


def failing(*given: Any) -> torch.Tensor:
    """Have no memory."""
    raise MemoryError("no room")
