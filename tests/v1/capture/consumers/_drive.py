# SPDX-License-Identifier: Apache-2.0
"""Feeds a consumer like the framework does, without an engine."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.v1.capture import _strategies
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.types import (
    CaptureResult,
    VllmInternalRequestId,
)
from vllm.v1.residual.tap import Tap

WAIT = 30.0


context = partial(_strategies.context, num_prompt_tokens=10, max_tokens=5)
"""A request with ten prompt rows and four generated ones."""


def consumer_at(root: Path, **params: Any) -> FilesystemConsumer:
    return FilesystemConsumer(None, {"root": str(root), **params})


def rows_of(num_rows: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def sidecar_of(
    request_id: str, tap: Tap, rows: torch.Tensor, **changes: Any
) -> dict[str, Any]:
    num_rows = len(rows)
    return {
        "layer": tap[0],
        "hook": tap[1],
        "dtype": str(rows.dtype).removeprefix("torch."),
        "hidden_size": rows.shape[1],
        "layer_convention": "0-based block index",
        "model": "toy",
        "positions": list(range(num_rows)),
        "token_ids": [100 + position for position in range(num_rows)],
        "num_rows": num_rows,
        "num_prompt_tokens": num_rows,
        "num_generated_tokens": 1,
        "num_samples": 1,
        "sample_index": 0,
        "finish_reason": "length",
        "vllm_internal_request_id": request_id,
        "client_request_id": request_id,
        "client_spec": None,
        "pipeline_parallel_rank": 0,
        "pipeline_parallel_size": 1,
    } | changes


def chunks_of(
    request_id: str, tap: Tap, rows: torch.Tensor, size: int
) -> list[GroupChunk]:
    return [
        GroupChunk(
            VllmInternalRequestId(request_id),
            (tap,),
            rows[None, first : first + size],
            first,
            first,
            list(range(first, min(first + size, len(rows)))),
        )
        for first in range(0, len(rows), size)
    ]


class Fed:
    """A consumer's lane, and the results of its requests."""

    def __init__(self, consumer: Any) -> None:
        self.lane = SinkLane("test", consumer, 1 << 30, 1 << 20)
        self.answers: dict[str, CaptureResult] = {}

    def send(self, request_id: str, rows: Mapping[Tap, torch.Tensor]) -> None:
        """Deliver a request in chunks of three rows, tap by tap, and end it."""
        for tap, tensor in rows.items():
            self.lane.submit(chunks_of(request_id, tap, tensor, 3))
        self.end(request_id, rows)

    def end(
        self, request_id: str, rows: Mapping[Tap, torch.Tensor], **changes: Any
    ) -> None:
        own = VllmInternalRequestId(request_id)
        ends = [
            GroupEnd(own, (tap,), sidecar_of(request_id, tap, tensor, **changes))
            for tap, tensor in rows.items()
        ]

        def answer(result: CaptureResult) -> None:
            self.answers[request_id] = result

        self.lane.finish(Ending(request_id, ends, answer))


def deliver(
    consumer: Any,
    requests: Mapping[str, Mapping[Tap, torch.Tensor]],
    chunk_rows: int = 4,
    surplus: int = 0,
    **changes: Any,
) -> dict[str, CaptureResult]:
    """Deliver rows in chunks, step by step; returns the results of the requests.

    After each key's rows, `surplus` invalid ones follow. The consumer is shut down at
    the end.
    """
    fed = Fed(consumer)
    for request_id, rows in requests.items():
        longer = {
            tap: torch.cat([tensor, tensor.new_zeros(surplus, tensor.shape[1])])
            for tap, tensor in rows.items()
        }
        steps = [
            chunks_of(request_id, tap, tensor, chunk_rows)
            for tap, tensor in longer.items()
        ]
        for step in range(max(map(len, steps), default=0)):
            fed.lane.submit([chunks[step] for chunks in steps if step < len(chunks)])
    for request_id, rows in requests.items():
        fed.end(request_id, rows, **changes)
    fed.lane.close(WAIT)
    return fed.answers
