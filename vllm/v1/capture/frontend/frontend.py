# SPDX-License-Identifier: Apache-2.0
"""Capture in the front end: admission, the ends of requests, and their results."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend import streaming_input
from vllm.v1.capture.frontend.admission import Admission
from vllm.v1.capture.frontend.disabled import NoCapture
from vllm.v1.capture.frontend.driver import DriverLanes
from vllm.v1.capture.frontend.inflight_limit import InflightLimit
from vllm.v1.capture.frontend.metrics import CaptureMetrics
from vllm.v1.capture.frontend.path_locks import PathLocks, other_servers
from vllm.v1.capture.frontend.portions import Portions
from vllm.v1.capture.frontend.request_ends import Ends, EndsSender
from vllm.v1.capture.frontend.request_tracker import RequestTracker
from vllm.v1.capture.frontend.status import CaptureStatus
from vllm.v1.capture.frontend.streaming import LiveRows
from vllm.v1.capture.frontend.unsent import when_response_ends
from vllm.v1.capture.frontend.waiting import ResultWaiter
from vllm.v1.capture.plan import LIVE
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    CountersMessage,
    Inbox,
    Message,
    ResultMessage,
)
from vllm.v1.capture.types import CaptureChunk
from vllm.v1.capture.worker.stats_reporter import PERIOD_SECONDS
from vllm.v1.readouts.frontend.admission import ReadoutAdmission

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager


class CaptureFrontend(NoCapture):
    """One per engine client; results come in on a thread of their own."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        admission: Admission,
        send_ends: EndsSender,
        live: LiveRows,
        alive: Callable[[], bool],
        offline_engine: "LLMEngine | None" = None,
    ) -> None:
        """Start listening.

        Args:
            vllm_config: the engine's configuration.
            admission: checks what requests ask for.
            send_ends: gives the engine the ends of requests.
            live: the rows of requests that are read output by output.
            alive: whether the engine lives.
            offline_engine: an engine that only runs when it is told to.

        """
        self._vllm_config = vllm_config
        self._servers = vllm_config.parallel_config._api_process_count
        self._stages = vllm_config.parallel_config.pipeline_parallel_size
        self._introduced = False
        self._introducing = asyncio.Lock()
        self._admission = admission
        self._live = live
        self._requests = RequestTracker(
            PathLocks(
                admission.capabilities,
                other_servers(self._servers),
            ),
            self._stages,
            answered=lambda name, seconds: self._status.finalized(name, seconds),
            forgotten=live.close,
        )
        self._awaited = ResultWaiter(self._requests, alive)
        self._room = InflightLimit(admission.held, self._requests)
        self._inbox = Inbox(self._receive)
        self._portions = (
            None if offline_engine is None else Portions(offline_engine, self.wait)
        )
        self._ends = Ends(send_ends, self._inbox.address)
        self._drivers = DriverLanes(
            vllm_config.capture_config,
            admission.consumers,
            self._inbox.address,
            self._requests.note,
        )
        self._status = CaptureStatus(self._drivers.counters)

    @property
    def readouts(self) -> ReadoutAdmission:
        """What requests may read out."""
        return self._admission.readouts

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        resumable: bool = False,
    ) -> None:
        """Check what a request asks for and put its plan into `params`.

        Raises:
            CaptureValidationError: nothing was scheduled; the message says what
                to change.

        """
        if resumable:
            streaming_input.refuse(params.capture, self._admission.captures_everything)
        plan = self._admission.plan(
            request_id,
            params,
            num_prompt_tokens,
            self._inbox.address,
            self._live.instances(params),
        )
        if plan is not None:
            plan = self._requests.claims.reserve(params.capture, plan)
            try:
                relieve = self._portions.relieve if self._portions else _no_relief
                self._room.reserve(plan, params.max_tokens, relieve)
            except CaptureValidationError:
                self._requests.claims.drop(plan)
                raise
        params._capture_plan = plan

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        """A sample is about to be sent to the engine."""
        plan = params._capture_plan
        if plan is None:
            return
        parent = state.parent_req.request_id if state.parent_req else state.request_id
        named = set(params.capture or {})
        with self._requests.changed:
            tracked = self._requests.begin(
                parent, state.request_index, state.request_id, plan.instances
            )
            capabilities = self._admission.capabilities
            tracked.waits = any(capabilities[name].waits for name in named)
            tracked.held = self._room.take(plan, params.max_tokens)
            tracked.idle = tuple(sorted(named - set(plan.instances)))
            self._requests.claims.take(params.capture, parent, plan)
            state.capture_id = parent
        if tracked.held:
            when_response_ends(partial(self._requests.abandon, parent))
        self._live.open(parent, plan, state.prompt_token_ids, params)
        if params.capture:
            context = self._admission.context(
                state.request_id,
                plan.num_prompt_tokens,
                params.max_tokens,
                plan.num_samples,
            )
            self._drivers.open(state.request_id, params.capture, context)

    def end_request(self, state: "RequestState", finish_reason: str) -> None:
        """A sample has ended for the client: by a stop, its length, or an abort."""
        sample = self._requests.end(state.request_id, finish_reason == "abort")
        if sample is not None:
            self._ends.note(state, sample, finish_reason)

    def refused(self, output: "RequestOutput") -> None:
        """The engine has not taken a request: no worker will answer for it."""
        parent = output.capture_id
        if parent is not None and not self._requests.is_complete(parent):
            self._requests.lose(parent, "the engine has refused the request")
        self.results(output)

    def flush(self) -> None:
        """Send the ends that were noted to the engine.

        Called after a batch of outputs, when every output that the ends rest on
        has been processed.
        """
        self._ends.flush()

    def results(self, output: "RequestOutput") -> None:
        """Put what is known by now into a final output."""
        if output.capture_id is not None:
            found = self._requests.results(output.capture_id, output.request_id)
            if found is not None:
                output.capture_results = found

    def note_results(self, outputs: Sequence["RequestOutput"]) -> None:
        """Put what is known by now into those of `outputs` that are final."""
        for output in outputs:
            if output.finished and getattr(output, "capture_id", None) is not None:
                self.results(output)

    def wait(self, outputs: Collection["RequestOutput"]) -> None:
        """Wait for the results of final outputs, and put them in."""
        for output in outputs:
            parent = getattr(output, "capture_id", None)
            if parent is not None:
                self._awaited.wait(parent)
                self.results(output)

    def take_finished(self) -> list[Any]:
        """Outputs of the list that is being run whose rows had to make room."""
        return [] if self._portions is None else self._portions.take()

    def drop_finished(self, request_ids: Collection[str]) -> None:
        """The list that these requests belong to was refused."""
        if self._portions is not None:
            self._portions.drop(request_ids)

    async def complete(self, output: "RequestOutput", params: "SamplingParams") -> None:
        """Put results into a final output; wait for them if the request says so.

        An output before the last gets the rows that have come in by now. To be asked
        of requests that are captured.
        """
        parent = output.capture_id
        assert parent is not None, "the output of a request that nobody captures"
        if not output.finished:
            self._live.show(parent, output)
            return
        self._live.close(parent)
        if params.capture_wait or self._requests.waits(parent):
            await self._awaited.wait_async(parent)
        self.results(output)

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """Show metrics beside the engine's, if it shows any."""
        if manager is not None:
            model = str(self._vllm_config.model_config.served_model_name)
            self._status.publish(
                CaptureMetrics(
                    model, manager.engine_indexes, sorted(self._admission.consumers)
                )
            )

    async def listen(self, core: Any) -> None:
        """Before `describe`: hear of what was captured through other API servers.

        Workers know of the front ends that captures have come from, so this one, if
        it is not the only one, makes itself known and waits for their first reports.

        Args:
            core: the client of the engine cores.

        """
        if self._servers == 1:
            return
        async with self._introducing:
            if self._introduced:
                return
            await core.call_utility_async("introduce_capture", self._inbox.address)
            workers = len(core.core_engines) * self._stages
            deadline = monotonic() + 3 * PERIOD_SECONDS
            while self._status.num_workers() < workers and monotonic() < deadline:
                await asyncio.sleep(0.05)
            self._introduced = True

    def describe(self) -> dict[str, Any]:
        """Consumers, limits and counters, as plain data."""
        counters = self._status.counters()
        counters["requests_under_way"] = self._requests.count()
        told = {
            **self._admission.describe(),
            "counters": counters,
            "host_memory": self._status.host_memory(),
        }
        return told if self._servers == 1 else {**told, "api_servers": self._servers}

    def settle(self) -> None:
        """Wait until the engine knows the end of every request that has ended.

        What it does not know when it stops is lost. Not to be called on an event
        loop's thread.
        """
        self._ends.settle()

    def close(self) -> None:
        """Shut driver-side consumers down and stop listening."""
        self._drivers.close(30.0)
        self._inbox.close()

    def _receive(self, message: Message) -> None:
        if isinstance(message, ChunksMessage) and message.instance == LIVE:
            self._show_live(message)
        elif isinstance(message, CountersMessage):
            self._status.take(message)
        elif isinstance(message, ResultMessage):
            self._requests.note(
                message.request_id, message.instance, message.stage, message.result()
            )

    def _show_live(self, message: ChunksMessage) -> None:
        chunks: dict[str, list[CaptureChunk]] = {}
        for part in message.chunks:
            chunks.setdefault(part.request_id, []).append(part.chunk())
        for request_id, rows in chunks.items():
            owner = self._requests.owner_of(request_id)
            if owner is not None:
                self._live.put(*owner, rows)


def _no_relief() -> bool:
    """A serving engine runs by itself: whoever asks too early asks again."""
    return False
