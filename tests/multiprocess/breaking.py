# SPDX-License-Identifier: Apache-2.0
"""A worker that fails to compute attention patterns when it is told to."""

from typing import Any

import torch

from vllm.v1.readouts.worker.attention import AttentionPatterns

scores = AttentionPatterns._scores


class Breaking:
    """Used as `worker_extension_cls`."""

    def fail_patterns(self, rank: int | None) -> None:
        """From now on let this rank fail, or none."""
        fails = rank == torch.distributed.get_rank()
        made = failing if fails else scores
        AttentionPatterns._scores = made  # type: ignore[method-assign]


def failing(*given: Any) -> torch.Tensor:
    """Have no memory."""
    raise MemoryError("no room for scores")
