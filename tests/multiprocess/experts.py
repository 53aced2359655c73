# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for parts of expert parallelism that upstream lacks on a CPU.

On a CPU two collectives are missing, and every expert is treated as local.
"""

from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad


def complete_on_cpu() -> None:
    """Let experts of several ranks work on a CPU."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    run_experts = CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> None:
        if given["expert_map"] is not None:
            own = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"] * (own >= 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        run_experts(self, **given)

    CPUUnquantizedExperts.apply = apply  # type: ignore[method-assign, assignment]
    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[method-assign]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[method-assign]


def _all_gatherv(self: Any, given: Any, dim: int, sizes: list[int]) -> Any:
    if not isinstance(given, torch.Tensor):
        return [_all_gatherv(self, one, dim, sizes) for one in given]
    assert dim == 0 and given.dim() == 2
    size = max(sizes)
    padded = pad(given, (0, 0, 0, size - len(given))).contiguous()
    parts = self.all_gather(padded, 0).split(size)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, given: Any, dim: int, sizes: list[int]) -> Any:
    assert dim == 0
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    start = [0, *accumulate(sizes)][self.rank_in_group]
    return total[start : start + sizes[self.rank_in_group]]


def share_in_one_engine() -> None:
    """Split tokens in one engine, which upstream does with several engines only."""
    from vllm.config import ParallelConfig

    ParallelConfig.use_sequence_parallel_moe = property(  # type: ignore[method-assign, assignment]
        lambda self: self.enable_expert_parallel and self.tensor_parallel_size > 1
    )
