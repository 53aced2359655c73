# SPDX-License-Identifier: Apache-2.0
"""The capture front end: admits requests, reports their ends, collects results."""

import asyncio
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.capture.engine_args import ready_instances
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.frontend.admission import Admission, ReadoutPlanner
from vllm.v1.capture.frontend.disabled import NO_CAPTURE, NoCapture
from vllm.v1.capture.frontend.driver import DriverLanes
from vllm.v1.capture.frontend.ends import Ends, OfflineEnds, ServedEnds
from vllm.v1.capture.frontend.inflight_limit import (
    KEEPING,
    RESULT_BYTES,
    RESULTS,
    InflightLimit,
)
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.request_tracker import RequestTracker, ResultWaiter
from vllm.v1.capture.frontend.status import CaptureMetrics, CaptureStatus
from vllm.v1.capture.frontend.streaming import LiveRequest, carries_rows
from vllm.v1.capture.frontend.unsent import when_response_ends
from vllm.v1.capture.registry import build_consumer, check_folders
from vllm.v1.capture.transport.addresses import host_for
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    CountersMessage,
    Inbox,
    Message,
    ResultMessage,
)
from vllm.v1.capture.types import CaptureResult
from vllm.v1.capture.worker.stats_reporter import PERIOD_SECONDS
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.residual.capture_plan import LIVE
from vllm.v1.residual.sizes import row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager


logger = init_logger(__name__)


def open_capture(
    engine: "LLMEngine | AsyncLLM", readouts: ReadoutPlanner, offline: bool
) -> NoCapture:
    """The front end of an engine.

    Args:
        engine: the engine.
        readouts: plans the readouts of its requests.
        offline: whether it is an `LLMEngine`, whose core may run in this process; the
            core of an `AsyncLLM` runs in other ones.

    """
    config = engine.vllm_config.capture_config
    if not config.enabled:
        return NO_CAPTURE
    consumers = {
        entry.instance_name: build_consumer(entry, engine.vllm_config)
        for entry in config.consumers
    }
    consumers.update(ready_instances(config))
    admission = Admission(engine.vllm_config, consumers, readouts)
    check_folders(admission.capabilities)
    resources = getattr(engine.engine_core, "resources", None)
    frontend = CaptureFrontend(
        engine.vllm_config,
        admission,
        partial(OfflineEnds if offline else ServedEnds, engine.engine_core),
        lambda: not getattr(resources, "engine_dead", False),
        offline,
    )
    weakref.finalize(engine, frontend.close)
    return frontend


def refuse_streaming_input(capture: Any, everyone: Sequence[str]) -> None:
    """Refuse a session with streaming input that would be captured.

    The length of a prompt that comes in parts is unknown at admission, and the session
    ends several times for its client, a captured request only once.

    Args:
        capture: `SamplingParams.capture` of the session.
        everyone: names of the instances that capture every request.

    Raises:
        CaptureValidationError: `capture` is set or `everyone` is not empty.

    """
    if capture is not None:
        raise fail(
            "capture: a request with streaming input cannot be captured yet; send the "
            "whole prompt",
            "capture",
            capture,
        )
    if everyone:
        raise fail(
            f"capture: {list(everyone)} capture every request, and one with streaming "
            "input cannot be captured yet; send the whole prompt, or start the server "
            "without their global capture",
            "capture",
            list(everyone),
        )


class CaptureFrontend(NoCapture):
    """Capture in the process of the API server or `LLM`; one per engine client.

    Results and streamed rows arrive on the thread of its `Inbox`.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        admission: Admission,
        ends: Callable[[str], Ends],
        alive: Callable[[], bool],
        offline: bool = False,
    ) -> None:
        """Start listening for results.

        Args:
            vllm_config: the engine's configuration.
            admission: validates requests.
            ends: sends the ends of requests to the engine, given the address for
                their results.
            alive: whether the engine is running.
            offline: whether the caller runs the engine; what it returns is the
                caller's, and has no limit in common.

        """
        self._vllm_config = vllm_config
        self._servers = vllm_config.parallel_config._api_process_count
        self._stages = vllm_config.parallel_config.pipeline_parallel_size
        self._introduced = False
        self._closed = False
        self._introducing = asyncio.Lock()
        self._admission = admission
        self._requests = RequestTracker(
            PathLocks(admission.capabilities),
            self._stages,
            answered=lambda name, seconds: self._status.finalized(name, seconds),
        )
        self._awaited = ResultWaiter(self._requests, alive)
        size = row_bytes(vllm_config.model_config)
        self._offline = offline
        served = {} if offline else admission.capabilities
        self._room = InflightLimit(served, size, self._requests)
        self._streaming = frozenset(name for name, can in served.items() if can.streams)
        """The consumers whose rows intermediate outputs may carry."""
        if not offline:
            self._room.limits[RESULTS] = RESULT_BYTES
            budget = vllm_config.capture_config.host_memory_bytes
            self._room.limits[KEEPING] = budget
        host = host_for(vllm_config.parallel_config)
        self._inbox = Inbox(self._receive, host=host)
        self._drivers = DriverLanes(
            vllm_config.capture_config,
            admission.consumers,
            self._inbox.address,
            self._requests.note,
            host,
        )
        self._address = self._drivers.address
        self._ends = ends(self._address)
        self._status = CaptureStatus(self._drivers.counters)
        self._stores = vllm_config.capture_config.store_bytes > 0

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        resumable: bool = False,
    ) -> None:
        """Validate a request and store its plan in `params._capture_plan`.

        Reserves its output paths and the bytes of its rows.

        Args:
            request_id: the client's id of the request.
            params: its sampling parameters.
            num_prompt_tokens: of the request.
            resumable: whether its prompt comes in parts (streaming input).

        Raises:
            CaptureValidationError: it is refused; the message says what to change.

        """
        if resumable:
            refuse_streaming_input(params.capture, self._admission.captures_everything)
        plan = self._admission.plan(
            request_id,
            params,
            num_prompt_tokens,
            self._address,
            self._streaming if carries_rows(params) else (),
        )
        if plan is not None:
            if plan.lanes or params.capture:
                plan = self._requests.claims.reserve(params.capture, plan)
            try:
                self._room.reserve(plan, params.max_tokens)
            except CaptureValidationError:
                self._requests.claims.release(id(plan))
                raise
        params._capture_plan = plan

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        """Track a sample that is about to be sent to the engine."""
        plan = params._capture_plan
        if plan is None:
            return
        parent = state.parent_req.request_id if state.parent_req else state.request_id
        named = set(params.capture or {})
        with self._requests.lock:
            sizes = self._room.take(plan, params.max_tokens)
            if not (plan.lanes or params.capture or sizes):
                return  # Readouts that no consumer takes come with the outputs.
            tracked = self._requests.begin(
                parent, state.request_index, state.request_id, plan.instances
            )
            capabilities = self._admission.capabilities
            tracked.client_id = state.external_req_id
            sample = tracked.samples[state.request_index]
            sample.plan, sample.counts_cached = plan, self._stores
            tracked.waits = any(capabilities[name].waits for name in named)
            self._requests.hold(parent, sizes)
            if LIVE in plan.lanes and tracked.live is None:
                prompt, kind = state.prompt_token_ids, params.output_kind
                tracked.live = LiveRequest(plan, prompt, kind, self._streaming)
            tracked.idle = tuple(sorted(named - set(plan.instances)))
            self._requests.claims.take(params.capture, parent, plan)
            state.residual.capture_id = parent
        if tracked.held:
            when_response_ends(partial(self._requests.discard, parent))
        if params.capture:
            self._drivers.open(
                state.request_id,
                params.capture,
                lambda: self._admission.context(
                    state.request_id,
                    plan.num_prompt_tokens,
                    max_tokens=params.max_tokens,
                    num_samples=plan.num_samples,
                ),
            )

    def end_request(self, state: "RequestState", finish_reason: str) -> None:
        """Note the end of a sample for its client: a stop, its length or an abort."""
        sample = self._requests.end(state.request_id, finish_reason == "abort")
        if sample is not None and sample.instances:
            self._ends.note(state, sample, finish_reason)
            self._status.note_rows(sample.kept, sample.cached)

    def refused(self, output: "RequestOutput") -> None:
        """Fail the results of a request that the engine core refused."""
        parent = output.capture_id
        if parent is not None and not self._requests.is_complete(parent):
            self._requests.lose(parent, "the engine has refused the request")
        self.results(output)

    def flush(self) -> None:
        """Send the noted ends to the engine.

        Called after each batch of outputs was processed completely.
        """
        self._ends.flush()

    def results(self, output: "RequestOutput") -> None:
        """Attach the results known so far to a final output."""
        if output.capture_id is not None:
            found = self._requests.results(output.capture_id, output.request_id)
            if found is not None:
                output.capture_results = found
                self._extend_metrics(output)

    def _extend_metrics(self, output: "RequestOutput") -> None:
        """Put payloads where scripts of other systems look for them."""
        capabilities = self._admission.capabilities
        extras = {
            capabilities[name].metrics_key: result.payload
            for name, result in (output.capture_results or {}).items()
            if capabilities[name].metrics_key and result.payload is not None
        }
        if extras:
            output.metrics = output.metrics or RequestStateStats()
            output.metrics.extras = extras  # type: ignore[attr-defined]

    def note_results(self, outputs: Sequence["RequestOutput"]) -> None:
        """Attach the results known so far to the final ones of `outputs`."""
        for output in outputs:
            if output.finished and getattr(output, "capture_id", None) is not None:
                self.results(output)

    def wait(self, outputs: Collection["RequestOutput"]) -> None:
        """Wait for the results of final outputs, and attach them."""
        # The last ones first: this thread then seldom interrupts the one that takes
        # the results of the others.
        for output in reversed(list(outputs)):
            parent = getattr(output, "capture_id", None)
            if parent is not None:
                self._awaited.wait(parent)
                self.results(output)

    async def complete(self, output: "RequestOutput", params: "SamplingParams") -> None:
        """Attach results to a final output, waiting for them if the request asks to.

        An intermediate output gets the rows received so far. Only to be called for
        requests that are captured.
        """
        parent = output.capture_id
        assert parent is not None, "the output of a request without captures"
        self._requests.show_live(parent, output)
        if not output.finished:
            return
        if params.capture_wait or self._requests.waits(parent):
            await self._awaited.wait_async(parent)
        self.results(output)

    async def wait_for_results(
        self, client_id: str, timeout: float | None
    ) -> dict[str, CaptureResult] | None:
        """Wait for results that a request's final output did not have.

        Args:
            client_id: the id under which the request was submitted.
            timeout: seconds to wait at most.

        Returns:
            The results; None if there is nothing to wait for, or it took too long.

        """
        parent = self._requests.named(client_id)
        if parent is None:
            return None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._awaited.wait_async(parent), timeout)
        if not self._requests.is_complete(parent):
            return None
        return self._requests.results(parent, client_id)

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """Export Prometheus metrics, if the engine does."""
        if manager is not None:
            model = str(self._vllm_config.model_config.served_model_name)
            self._status.publish(
                CaptureMetrics(
                    model, manager.engine_indexes, sorted(self._admission.consumers)
                )
            )

    async def listen(self, core: Any) -> None:
        """Make all workers report to this front end; called before `describe`.

        Workers report to the front ends that they have received captures from. If there
        are several API servers, this one registers itself at the workers and waits for
        their first reports, so that captures through the others are counted.

        Args:
            core: the client of the engine cores.

        """
        if self._servers == 1:
            return
        async with self._introducing:
            if self._introduced:
                return
            await core.call_utility_async("introduce_capture", self._address)
            workers = len(core.core_engines) * self._stages
            deadline = monotonic() + 3 * PERIOD_SECONDS
            while self._status.num_workers() < workers and monotonic() < deadline:
                await asyncio.sleep(0.05)
            self._introduced = True

    def consumers(self) -> Mapping[str, Any]:
        """The instances of this process, by name."""
        return self._admission.consumers

    def describe(self) -> dict[str, Any]:
        """Consumers, limits, counters and host memory, as JSON-like data."""
        counters = self._status.counters()
        counters["requests_in_flight"] = self._requests.count()
        status = {
            **self._admission.describe(),
            "counters": counters,
            "host_memory": self._status.host_memory(),
        }
        if self._servers > 1:
            status["api_servers"] = self._servers
        return status

    def settle(self) -> None:
        """Wait until the engine has received the ends that were sent.

        Captures whose end it does not know when it stops are lost. Not to be called on
        the thread of an event loop.
        """
        self._ends.settle()

    def close(self) -> None:
        """Shut down driver-side consumers and stop listening; only the first call.

        Upstream closes an engine again in its finalizer. While the interpreter ends no
        thread can start, and waiting for one would never end.
        """
        if self._closed or sys.is_finalizing():
            return
        self._closed = True
        if self._offline:  # Nothing else waits for them.
            self._ends.settle()
        self._drivers.close(30.0)
        self._inbox.close()

    def _receive(self, message: Message) -> None:
        if isinstance(message, ChunksMessage):
            for rows in message.chunks:  # Of `LIVE`: others have their own addresses.
                self._requests.put_live(rows)
        elif isinstance(message, CountersMessage):
            self._status.take(message)
        elif isinstance(message, ResultMessage):
            self._requests.note(
                message.request_id, message.instance, message.stage, message.result()
            )
