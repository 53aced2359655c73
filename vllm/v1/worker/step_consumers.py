# SPDX-License-Identifier: Apache-2.0
"""Runs the consumers that are called within each step, and carries out actions.

The first tensor-parallel rank has the rows and calls them; what they want is sent to
the other ranks, so that all apply it after the same step. With pipeline stages it
travels to the last one with the hidden states of the step, and in its output to the
scheduler, which passes it on to the ranks of all stages.
"""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.capture.capabilities import StepCapabilities, step_capabilities
from vllm.v1.capture.registry import build_consumer
from vllm.v1.capture.step_view import StepCaptureView, StepRequestView
from vllm.v1.readouts.worker.jobs import Job
from vllm.v1.readouts.worker.worker import RowsOfJob
from vllm.v1.residual.plugin_errors import is_interrupt
from vllm.v1.residual.steering_actions import Acting, Action, SteeringActionQueue
from vllm.v1.steering.worker.worker import WorkerSteering

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

BUDGET_SECONDS = 0.002
"""A step in which a consumer takes longer is counted as over budget."""


class StepConsumers:
    """The consumers of one worker. Engine thread only."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        steering: WorkerSteering | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create the consumers of the configuration, on the rank that calls them."""
        self._consumers: dict[str, Any] = {}
        self._can: dict[str, StepCapabilities] = {}
        self._stats: dict[str, dict[str, float]] = {}
        self._ranks = get_tp_group()
        self._has_stages = get_pp_group().world_size > 1
        self._has_ranks = self._has_stages or self._ranks.world_size > 1
        decides = self._ranks.rank_in_group == 0
        for entry in vllm_config.capture_config.step_consumers if decides else ():
            name = entry.instance_name
            consumer = self._consumers[name] = build_consumer(entry, vllm_config)
            self._can[name] = step_capabilities(consumer)
            self._can[name].warmup(device, dtype)
            names = ("steps", "total_ms", "max_ms", "over_budget_steps")
            self._stats[name] = dict.fromkeys(names, 0)
        self._steering = steering
        self._prompts: dict[str, tuple[list[int], str | None]] = {}
        if decides and steering is not None and steering.dynamic is not None:
            SteeringActionQueue.current = steering.dynamic.queue
        self._complained: set[str] = set()
        self._step = 0

    def begin_requests(
        self, begun: Iterable[tuple[str, list[int] | None, str | None]]
    ) -> None:
        """Note the prompt and the conversation of requests that begin."""
        if not self._consumers:
            return
        for req_id, prompt, conversation in begun:
            self._prompts[req_id] = (list(prompt or ()), conversation)

    def end_requests(self, finished: Iterable[str]) -> None:
        """Forget requests that have ended."""
        ended = [one for one in finished if self._prompts.pop(one, None) is not None]
        for name, can in self._can.items() if ended else ():
            try:
                can.end_requests(ended)
            except BaseException as error:  # Plug-in code may raise anything.
                if is_interrupt(error):
                    raise
                logger.exception("The consumer %r failed in end_requests", name)

    def begin_step(self) -> None:
        """Carry out what other threads of this process have submitted.

        With one rank only; others apply what the first has sent in a step.
        """
        steering = self._steering
        if steering is None or steering.dynamic is None or self._has_ranks:
            return
        if not steering.dynamic.queue.is_empty:
            steering.act(self._taken())

    @property
    def acting(self) -> Acting | None:
        """What acts at generated tokens of the step that begins; None if nothing."""
        steering = self._steering
        if steering is None or steering.dynamic is None:
            return None
        return steering.dynamic.acting

    def on_rows(self, jobs: Sequence[RowsOfJob], further: int) -> None:
        """Call the consumers of a step's jobs, and carry out what they want.

        Args:
            jobs: each with the rows of all requests `[R, hidden_size]`, those of a
                token's taps adjacent; the same jobs on every rank.
            further: added to the positions of the jobs' entries.

        """
        for job, rows in jobs:
            if rows is not None:
                self._call(job, rows, further)
        if self._steering is not None and not self._has_stages:
            self._steering.act(self._ranks.broadcast_object(self._taken()))

    def _taken(self) -> list[Action]:
        """The actions of this rank's consumers, and of its queue."""
        if self._steering is None or self._steering.dynamic is None:
            return []
        return self._steering.dynamic.taken()

    def take(self) -> list[Action]:
        """What the consumers of this stage want, if there are several stages."""
        return self._taken() if self._has_stages else []

    def _call(self, job: Job, rows: torch.Tensor, further: int) -> None:
        """Call the consumer of a job, and queue its actions."""
        name = job.entries[0].readout.module
        taps = job.entries[0].readout.taps
        by_tap = rows.view(-1, len(taps), rows.shape[-1])  # [tokens, taps, H]
        view = StepCaptureView(
            self._step,
            {tap: by_tap[:, number] for number, tap in enumerate(taps)},
            [
                self._request(one, one.first // len(taps), further)
                for one in job.entries
            ],
        )
        self._step += 1
        began = perf_counter()
        try:
            actions = list(self._consumers[name].on_step(view) or ())
        except BaseException as error:  # Plug-in code may raise anything.
            if is_interrupt(error):
                raise
            actions = []
            if name not in self._complained:
                self._complained.add(name)
                logger.exception("The consumer %r failed in on_step", name)
        self._count(name, 1000 * (perf_counter() - began))
        if self._steering is not None and self._steering.dynamic is not None:
            for action in actions:
                self._steering.dynamic.queue.submit(action)
        elif actions and name not in self._complained:
            self._complained.add(name)
            logger.error(
                "The consumer %r returns actions, and this engine does not steer; "
                "start it with --enable-steering",
                name,
            )

    def _request(self, entry: Any, start: int, further: int) -> StepRequestView:
        prompt, conversation = self._prompts.get(entry.req_id, ([], None))
        first = entry.start + further
        tokens = prompt[first : first + entry.count]
        tokens += [-1] * (entry.count - len(tokens))
        return StepRequestView(
            req_id=entry.req_id,
            start=start,
            end=start + entry.count,
            phase="prefill" if first < len(prompt) else "decode",
            token_ids=np.asarray(tokens, dtype=np.int64),
            conversation_id=conversation,
        )

    def _count(self, name: str, ms: float) -> None:
        stats = self._stats[name]
        stats["steps"] += 1
        stats["total_ms"] += ms
        stats["max_ms"] = max(stats["max_ms"], ms)
        stats["over_budget_steps"] += ms > 1000 * BUDGET_SECONDS

    def status(self) -> Mapping[str, Any]:
        """By consumer: time and steps, and what it tells itself."""
        return {
            name: {**self._stats[name], **can.status()}
            for name, can in self._can.items()
        }

    def close(self) -> None:
        """Shut the consumers down."""
        SteeringActionQueue.current = None
        for name, can in self._can.items():
            try:
                can.shutdown()
            except BaseException as error:  # Plug-in code may raise anything.
                if is_interrupt(error):
                    raise
                logger.exception("The consumer %r failed to shut down", name)
