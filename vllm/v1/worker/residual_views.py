# SPDX-License-Identifier: Apache-2.0
"""The batch of a step, as the two model runners store it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.step_view import StepView

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch


def v1_view(
    input_batch: "InputBatch",
    num_scheduled: np.ndarray[Any, Any],
    num_rows: int,
    true_starts: torch.Tensor | None = None,
) -> StepView:
    """The view of the V1 runner's batch, after its inputs were prepared.

    Args:
        input_batch: the batch.
        num_scheduled: `[num_reqs]`, tokens of each request.
        num_rows: rows of the step's tensors, padding included.
        true_starts: the true positions, if those of the batch are only assumed.

    """
    num_reqs = len(num_scheduled)
    return StepView(
        req_ids=input_batch.req_ids,
        num_computed=input_batch.num_computed_tokens_cpu[:num_reqs],
        num_scheduled=num_scheduled,
        num_rows=num_rows,
        true_starts=None
        if true_starts is None
        else lambda: true_starts[:num_reqs].clone(),
    )


def v2_view(req_states: "RequestState", batch: "BatchReqState") -> StepView:
    """The view of the V2 runner's batch, after the batch was gathered."""
    num_scheduled = batch.num_scheduled_tokens
    return StepView(
        req_ids=batch.req_ids,
        num_computed=req_states.num_computed_tokens_np[batch.idx_mapping_np],
        num_scheduled=num_scheduled,
        num_rows=batch.num_tokens,
        true_starts=partial(_starts_on_device, req_states, batch)
        if req_states.num_speculative_steps
        else None,
    )


def _starts_on_device(
    req_states: "RequestState", batch: "BatchReqState"
) -> torch.Tensor:
    """The start positions without rejected draft tokens, `[num_reqs]` on the device."""
    known = req_states.num_computed_tokens.gpu
    return known[async_tensor_h2d(batch.idx_mapping_np, device=known.device)]


def first_rows(
    logits: torch.Tensor | None,
    input_batch: "InputBatch",
    drafts: Mapping[str, Sequence[int]],
) -> torch.Tensor | None:
    """The first row of logits of each request (V1 runner), which is not a draft's.

    Args:
        logits: `[rows, vocabulary]`; None on ranks that have none.
        input_batch: the batch.
        drafts: the draft tokens of each request that has any.

    """
    if logits is None:
        return None
    counts = [1 + len(drafts.get(req_id, ())) for req_id in input_batch.req_ids]
    first = np.cumsum([0, *counts[:-1]])
    return logits[torch.from_numpy(first).to(logits.device)]
