# SPDX-License-Identifier: Apache-2.0
"""A worker's capture without a model: the test fills the taps."""

import queue
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from msgspec import structs

from tests.v1.capture._simulation import WIDTH, Life
from tests.v1.capture._sinks import WAIT
from tests.v1.capture._strategies import HOOKS
from vllm.config.capture import CaptureConfig
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.tap import ResidualTap
from vllm.v1.capture.groups import chunks_in
from vllm.v1.capture.staging.request_pages import RequestPages
from vllm.v1.capture.staging.ring import Parts, Segment, Staging
from vllm.v1.capture.staging.slot_mapping import slots_of
from vllm.v1.capture.transport.addresses import rows_address
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    CountersMessage,
    EndMessage,
    Inbox,
)
from vllm.v1.capture.worker.worker import Stage, WorkerCapture
from vllm.v1.residual.capture_plan import CaptureEnd, CapturePlan
from vllm.v1.residual.row_blocks import Block
from vllm.v1.residual.spans import Spans
from vllm.v1.residual.step_view import StepView

TAPS = [(layer, hook) for layer in range(3) for hook in HOOKS]
STEP_TOKENS, STEP_ROWS = 66, 66 * len(TAPS)
ROW_BYTES = WIDTH * 4


class HostPages:
    """Memory for prompts' rows, as on a GPU; sometimes none is available."""

    def __init__(self) -> None:
        self.asked = count(1)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        if next(self.asked) % 7 == 0:
            return None
        return torch.full(tuple(shape), torch.nan, dtype=dtype)


def with_pages(staging: Staging, every: int) -> None:
    """Let some large steps use pages, as a GPU's staging memory does."""
    staging.requests = RequestPages(HostPages(), WIDTH, torch.float32, least=1)
    staging._page_rows = 0
    to_pages = staging.to_pages

    def copy(segment: Segment, blocks: Sequence[Block], parts: Parts) -> Any:
        sent = None if segment.num_rows % every else to_pages(segment, blocks, parts)
        return sent and (sent[0], SimpleNamespace(synchronize=lambda: None))

    staging.to_pages = copy  # type: ignore[method-assign]


class Bench:
    """A worker whose rows are returned over a front end's socket."""

    def __init__(
        self,
        tensor_rank: int = 0,
        truncating: Sequence[str] = (),
        page_every: int = 2,
        batches: int = 1,
    ) -> None:
        """Start; steps with a multiple of `page_every` rows get a page."""
        self.messages: queue.Queue[Any] = queue.Queue()
        self.counters: queue.Queue[CountersMessage] = queue.Queue()
        self.inbox = Inbox(self._take)
        self.inboxes = [
            Inbox(self.messages.put, rows_address(self.inbox.address, name))
            for name in "abc"
        ]
        config: Any = SimpleNamespace(
            capture_config=CaptureConfig(
                driver_instances=list("abc"),
                driver_truncating=list(truncating),
                staging_bytes=2 * STEP_ROWS * ROW_BYTES,
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP_TOKENS),
            model_config=SimpleNamespace(served_model_name="tiny", model="tiny"),
            parallel_config=SimpleNamespace(
                data_parallel_index=0, pipeline_parallel_size=batches
            ),
            max_concurrent_batches=batches,
            speculative_config=None,
            use_v2_model_runner=False,
        )
        self.worker = WorkerCapture(
            config,
            Stage(tensor_rank, 0, 1),
            TAPS,
            WIDTH,
            torch.float32,
            torch.device("cpu"),
            Mock(counters={}),
        )
        staging = self.worker._staging
        # Apart from the device's, as on a GPU: what is not copied is not there.
        num_rows = staging.ring.num_rows
        staging.host_rows = torch.full((num_rows, WIDTH), torch.nan)
        with_pages(staging, page_every)
        self._names = count()
        self.taps = {tap: ResidualTap(*self.worker.tensors(tap)) for tap in TAPS}

    def _take(self, message: Any) -> None:
        counts = isinstance(message, CountersMessage)
        (self.counters if counts else self.messages).put(message)

    def new_name(self) -> str:
        """An unused request id: the engine never reuses one."""
        return f"r{next(self._names)}"

    def open(self, name: str, plan: CapturePlan) -> None:
        """A request is scheduled for the first time."""
        plan = structs.replace(plan, reply_to=self.inbox.address)
        prompt = list(range(plan.num_prompt_tokens))
        self.worker.add_request(name, plan, prompt, None)

    def step(
        self,
        batch: list[tuple[str, int, tuple[float, ...]]],
        ahead: Sequence[int] | None = None,
    ) -> None:
        """Run one step over `(request, first position, value of each row)`.

        `ahead`: the offset of each assumed position.
        """
        starts = np.array([start for _, start, _ in batch])
        true = torch.from_numpy(starts)
        scheduled = np.array([len(values) for _, _, values in batch])
        rows = int(scheduled.sum())
        view = StepView(
            [name for name, _, _ in batch],
            starts + np.array([0] if ahead is None else ahead),
            scheduled,
            rows,
            None if ahead is None else lambda: true,
        )
        Launch.taps = self.worker.plan_step(view)
        placed, padding = self.worker._placed, len(batch) % 3
        self.worker.begin_step(rows + padding)
        if placed is not None:  # Graphs launch ops of which this step reads nothing.
            expected = slots_of(placed.layout, range(len(TAPS)), STEP_TOKENS)
            found = self.worker._slots.of_taps[:, :STEP_TOKENS]
            assert found.tolist() == expected.tolist()
        values = torch.tensor([value for _, _, row in batch for value in row])
        for number, tap in enumerate(TAPS):
            # Each row includes the tap's number, so that an exchange is detected.
            stream = torch.stack([values, torch.full_like(values, number)], dim=1)
            self.taps[tap](stream, None)
        self.worker.end_step()

    def end(
        self, name: str, life: Life, kept: Mapping[str, Spans] | None = None
    ) -> None:
        tokens = list(range(life.counted))
        end = CaptureEnd(name, self.inbox.address, tokens, 0, "abort", list("abc"))
        self.worker.end_requests([structs.replace(end, kept=dict(kept or {}))])

    def collect(self, requests: int) -> dict[Any, list[tuple[float, float]]]:
        """Rows by `(request, instance, tap)`, after all requests have ended."""
        rows: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        ended = 0
        while ended < requests:
            message = self.messages.get(timeout=WAIT)
            if isinstance(message, ChunksMessage):
                for chunk in chunks_in(message.chunks):
                    key = chunk.key[0], message.instance, chunk.key[1:]
                    assert chunk.row_offset == len(rows[key])
                    rows[key] += [tuple(row) for row in chunk.tensor.tolist()]  # type: ignore[misc]
            else:
                assert isinstance(message, EndMessage), message
                ended += 1
        return {key: found for key, found in rows.items() if found}

    def close(self) -> None:
        self.worker.close()
        for inbox in (self.inbox, *self.inboxes):
            inbox.close()
