# SPDX-License-Identifier: Apache-2.0
"""The worker's part of capture without a model; rows have arbitrary contents.

Importing this needs the fork.
"""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch

from vllm.config.capture import CaptureConfig, parse_consumer
from vllm.v1.capture.transport.zmq_channel import Inbox, ResultMessage
from vllm.v1.capture.worker.worker import Stage, WorkerCapture
from vllm.v1.residual.capture_plan import CaptureEnd, CapturePlan, Reader, TapGroup
from vllm.v1.residual.readout_plan import KeepWhen, ReadoutPlan, StopWhen
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Tap

WAIT = 120.0
HOOKS = ("pre_attn", "post_attn", "post_block")


class WorkerAlone:
    """Capture in one worker, with the front end that receives its results."""

    def __init__(
        self,
        consumer: str,
        layers: int,
        width: int,
        device: torch.device,
    ) -> None:
        """Start a worker whose rows `[width]` in bfloat16 go to `consumer`."""
        parsed = parse_consumer(consumer)
        self._instance = parsed.instance_name
        capture = CaptureConfig(consumers=[parsed])
        self.rows_per_step = capture.rows_per_step(width * torch.bfloat16.itemsize)
        config: Any = SimpleNamespace(
            capture_config=capture,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
            model_config=SimpleNamespace(
                served_model_name="m",
                model="m",
                dtype=torch.bfloat16,
                max_model_len=8192,
                get_hidden_size=lambda: width,
                is_encoder_decoder=False,
                get_total_num_hidden_layers=lambda: layers,
            ),
            parallel_config=SimpleNamespace(
                data_parallel_index=0,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
            ),
            speculative_config=None,
            use_v2_model_runner=False,
        )
        self._answers: list[ResultMessage] = []
        self._inbox = Inbox(self._hear)
        taps = [(layer, hook) for layer in range(layers) for hook in HOOKS]
        stage = Stage(0, 0, 1)
        self._worker = WorkerCapture(config, stage, taps, width, torch.bfloat16, device)

    def _hear(self, message: Any) -> None:
        if isinstance(message, ResultMessage):
            self._answers.append(message)

    def open(
        self,
        ids: Sequence[str],
        prompt: int,
        taps: Sequence[Tap],
        positions: tuple[int, int],
        window: int = 0,
    ) -> None:
        """Start requests that capture the positions `[first, last)`.

        With a `window` they keep so many rows around tokens that fire; none does.
        """
        ranges = (positions,)
        group = TapGroup(tuple(taps), ranges, (Reader(self._instance, ranges),))
        readouts = None
        if window:
            rule, around = StopWhen("value", 0.0), (window, window)
            keep = KeepWhen(self._instance, rule, "token", *around)
            readouts = ReadoutPlan((), keep_when=(keep,))
            # Values are known as soon as they are asked for.
            self._worker.readouts = Mock(counters={}, tell=lambda told: told(()))
        for req_id in ids:
            plan = CapturePlan(
                req_id, prompt, (group,), self._inbox.address, readouts=readouts
            )
            self._worker.add_request(req_id, plan, list(range(prompt)), {})

    def step(
        self,
        ids: Sequence[str],
        computed: int | Sequence[int],
        scheduled: int | Sequence[int],
    ) -> None:
        """Run a step in which each request computes `scheduled` tokens."""
        self.run(view_of(ids, computed, scheduled))

    def run(self, view: StepView) -> None:
        """Make the calls of a step, without its forward pass."""
        self._worker.plan_step(view)
        self._worker.begin_step(view.num_rows)
        self._worker.end_step()

    @property
    def dispatcher_thread(self) -> int:
        """The native id of the dispatch thread."""
        number = self._worker._dispatcher._thread._thread.ident
        assert number is not None, "the dispatcher runs from its beginning"
        return number

    @property
    def consumer_thread(self) -> int:
        """The native id of the consumer's thread."""
        lane = self._worker._lanes[self._instance]
        lane.start()
        number = lane._thread.ident
        assert number is not None, "it was started"
        return number

    def end(self, ids: Sequence[str], generated: int) -> None:
        """End the requests after `generated` tokens."""
        tokens, address = list(range(generated)), self._inbox.address
        self._worker.end_requests(
            [
                CaptureEnd(
                    req_id,
                    address,
                    tokens,
                    0,
                    "length",
                    [self._instance],
                    kept={self._instance: ()},
                )
                for req_id in ids
            ]
        )

    def answers(self, count: int) -> list[ResultMessage]:
        """Wait for `count` results.

        Raises:
            RuntimeError: a result is missing, or is not complete.
        """
        deadline = time.monotonic() + WAIT
        while len(self._answers) < count and time.monotonic() < deadline:
            time.sleep(0.0005)
        found, self._answers = self._answers, []
        if len(found) != count or any(one.status != "ok" for one in found):
            raise RuntimeError(f"{count} results were to come, got {found}")
        return found

    def close(self) -> None:
        """Stop."""
        self._worker.close()
        self._inbox.close()


def thread_seconds(number: int) -> float:
    """CPU seconds of a thread of this process so far."""
    return time.clock_gettime(time.pthread_getcpuclockid(number))


def view_of(
    ids: Sequence[str], computed: int | Sequence[int], scheduled: int | Sequence[int]
) -> StepView:
    """A step in which each request computes `scheduled` tokens after `computed`."""
    counts = np.zeros(len(ids), dtype=np.int64) + scheduled
    starts = np.zeros(len(ids), dtype=np.int64) + computed
    return StepView(ids, starts, counts, int(counts.sum()))
