# SPDX-License-Identifier: Apache-2.0
"""Capture in the front end: admission, the ends of requests, and their results."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from vllm.logger import init_logger
from vllm.v1.capture.admission import Admission
from vllm.v1.capture.channel import (
    ChunksMessage,
    CountersMessage,
    Inbox,
    Message,
    ResultMessage,
)
from vllm.v1.capture.claims import Claims
from vllm.v1.capture.driver import DriverLanes
from vllm.v1.capture.held import Reservations
from vllm.v1.capture.live import LiveRows
from vllm.v1.capture.metrics import CaptureMetrics
from vllm.v1.capture.plan import LIVE, CapturePlan
from vllm.v1.capture.selectors import fail
from vllm.v1.capture.status import CaptureStatus
from vllm.v1.capture.tracking import Sample, Tracked
from vllm.v1.capture.types import CaptureChunk, CaptureResult
from vllm.v1.capture.wire import CaptureEnd

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager

logger = init_logger(__name__)

WAIT_SECONDS = 120.0
"""A request stops waiting for its results once none has come for so long."""

LOOK_SECONDS = 1.0
"""So often one who waits looks whether the engine lives."""

SETTLE_SECONDS = 2.0
"""An engine that is about to stop has so long to take what was sent to it."""

KEPT_RESULTS = 4096
"""Results of requests that nobody waited for are kept for this many requests."""


class EndsSender(Protocol):
    """Gives an engine the ends of requests."""

    def __call__(self, ends: list[CaptureEnd]) -> None:
        """Send them, now or soon."""

    def wait(self, timeout: float) -> None:
        """Until all that were sent have arrived, `timeout` seconds at most."""


class NoCapture:
    """The front end of a server without consumers: refuses, otherwise does nothing."""

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt_tokens: int,
        resumable: bool = False,
    ) -> None:
        """Refuse a request that wants something captured.

        Raises:
            CaptureValidationError: there is nobody to capture for.

        """
        if params.capture is not None:
            raise fail(
                "capture: this server has no capture consumers; start it with "
                "--capture-consumers NAME, or LLM(capture_consumers=[...]) offline",
                "capture",
                params.capture,
            )

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        """Nothing is tracked."""

    def end_request(self, state: "RequestState", finish_reason: str) -> None:
        """Nothing is tracked."""

    def flush(self) -> None:
        """Nothing is sent."""

    def wait(self, outputs: Sequence["RequestOutput"]) -> None:
        """There is nothing to wait for."""

    async def complete(self, output: "RequestOutput", params: "SamplingParams") -> None:
        """There are no results."""

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """There are no metrics."""

    def describe(self) -> dict[str, Any]:
        """Consumers, limits and counters, as plain data."""
        return {"consumers": [], "limits": {}, "hook_points": {}, "counters": {}}

    def settle(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


NO_CAPTURE = NoCapture()


class CaptureFrontend(NoCapture):
    """One per engine client; results come in on a thread of their own."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        admission: Admission,
        send_ends: EndsSender,
        live: LiveRows,
        alive: Callable[[], bool],
    ) -> None:
        """Start listening.

        Args:
            vllm_config: the engine's configuration.
            admission: checks what requests ask for.
            send_ends: gives the engine the ends of requests.
            live: the rows of requests that are read output by output.
            alive: whether the engine lives.

        """
        self._stages = vllm_config.parallel_config.pipeline_parallel_size
        self._admission = admission
        self._send_ends = send_ends
        self._live = live
        self._alive = alive
        self._claims = Claims(admission.consumers)
        self._tracked: dict[str, Tracked] = {}
        self._reserved = Reservations()
        self._owner: dict[str, tuple[str, int]] = {}
        self._ends: list[CaptureEnd] = []
        self._last_result = 0.0
        self._changed = threading.Condition()
        self._waiters: dict[str, list[Callable[[], None]]] = {}
        self._inbox = Inbox(self._receive)
        self._drivers = DriverLanes(
            vllm_config.capture_config,
            admission.consumers,
            self._inbox.address,
            self._note,
        )
        self._status = CaptureStatus(self._drivers.counters)
        self._vllm_config = vllm_config

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
        if resumable and params.capture is not None:
            raise fail(
                "capture: a request with streaming input cannot be captured yet; "
                "send the whole prompt",
                "capture",
                params.capture,
            )
        if resumable and (everyone := self._admission.captures_everything):
            raise fail(
                f"capture: {everyone} capture every request, and one with streaming "
                "input cannot be captured yet; send the whole prompt, or start the "
                "server without their global capture",
                "capture",
                everyone,
            )
        params._capture_plan = self._admission.plan(
            request_id,
            params,
            num_prompt_tokens,
            self._inbox.address,
            self._live.instances(params),
        )
        if params._capture_plan is not None:
            self._claims.check(params.capture)
            self._make_room(params._capture_plan, params)

    def _make_room(self, plan: CapturePlan, params: "SamplingParams") -> None:
        """Refuse a request whose rows would not fit beside those under way."""
        needed = self._admission.held.bytes_of(plan, params.max_tokens)
        with self._changed:
            for name, size in needed.items():
                self._check_room(name, size, LIVE in plan.lanes)
            if needed:
                self._reserved.put(plan, needed)

    def _check_room(self, name: str, size: int, live: bool) -> None:
        limit = self._admission.held.limits[name]
        tracked = self._tracked.values()
        held = sum(t.held.get(name, 0) for t in tracked if not t.aborted)
        held += self._reserved.bytes_for(name)
        left = sum(t.held.get(name, 0) for t in tracked if t.aborted)
        self._forget_aborted(name, left + held + size - limit)
        if size > limit:
            twice = ", twice what it returns, as its outputs carry rows before the "
            twice += "last (capture_stream=False ends that)"
            raise fail(
                f"capture.{name}: this request alone may hold {size} bytes of rows"
                f"{twice if live else ''}; at most {limit} are allowed "
                "(max_inflight_bytes). Capture fewer layers or positions, or lower "
                "max_tokens",
                f"capture.{name}",
                size,
            )
        if held + size > limit:
            raise fail(
                f"capture.{name}: this request may hold {size} bytes of rows, and "
                f"those under way may hold {held}; together at most {limit} are "
                "allowed (max_inflight_bytes). Send it again when others have ended, "
                "or capture less",
                f"capture.{name}",
                size,
            )

    def _forget_aborted(self, name: str, size: int) -> None:
        for parent, tracked in list(self._tracked.items()):
            if size <= 0:
                return
            if tracked.aborted and tracked.held.get(name) and tracked.complete():
                size -= tracked.held[name]
                self._forget(parent)

    def add_request(self, state: "RequestState", params: "SamplingParams") -> None:
        """A sample is about to be sent to the engine."""
        plan = params._capture_plan
        if plan is None:
            return
        parent = state.parent_req.request_id if state.parent_req else state.request_id
        with self._changed:
            tracked = self._tracked.setdefault(parent, Tracked())
            tracked.waits = any(
                getattr(self._admission.consumers[name], "waits", False)
                for name in params.capture or {}
            )
            tracked.held = self._admission.held.bytes_of(plan, params.max_tokens)
            self._reserved.take(plan)
            named = set(params.capture or {})
            tracked.idle = tuple(sorted(named - set(plan.instances)))
            tracked.samples[state.request_index] = Sample(plan.instances, self._stages)
            self._claims.take(params.capture, parent)
            state.capture_id = parent
            self._owner[state.request_id] = (parent, state.request_index)
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
        with self._changed:
            owner = self._owner.get(state.request_id)
            if owner is None:
                return
            tracked = self._tracked[owner[0]]
            sample = tracked.samples[owner[1]]
            sample.ended_at = monotonic()
            tracked.aborted = tracked.aborted or finish_reason == "abort"
        assert state.detokenizer is not None
        token_ids = list(state.detokenizer.output_token_ids)
        self._ends.append(
            CaptureEnd(
                request_id=state.request_id,
                reply_to=self._inbox.address,
                token_ids=token_ids,
                sample_index=state.request_index,
                finish_reason=finish_reason,
                instances=list(sample.instances),
            )
        )

    def flush(self) -> None:
        """Send the ends that were noted to the engine.

        Called after a batch of outputs, when every output that the ends rest on
        has been processed.
        """
        if self._ends:
            ends, self._ends = self._ends, []
            self._send_ends(ends)

    def results(self, output: "RequestOutput") -> None:
        """Put what is known by now into a final output."""
        parent = output.capture_id
        if parent is None:
            return
        with self._changed:
            tracked = self._tracked.get(parent)
            if tracked is None:
                return
            merged = tracked.merged(output.request_id)
            output.capture_results = merged
            if tracked.complete():
                self._forget(parent)

    def wait(self, outputs: Sequence["RequestOutput"]) -> None:
        """Wait for the results of final outputs, and put them in."""
        for output in outputs:
            parent = getattr(output, "capture_id", None)
            if parent is None:
                continue
            began = monotonic()
            while self._may_complete(parent, began):
                with self._changed:
                    self._changed.wait_for(
                        lambda parent=parent: self._is_complete(parent),  # type: ignore[misc]
                        LOOK_SECONDS,
                    )
            self.results(output)

    async def complete(self, output: "RequestOutput", params: "SamplingParams") -> None:
        """Put results into a final output; wait for them if the request says so.

        An output before the last gets the rows that have come in by now.
        """
        if output.capture_id is None:
            return
        if not output.finished:
            self._live.show(output.capture_id, output)
        else:
            self._live.close(output.capture_id)
            with self._changed:
                tracked = self._tracked.get(output.capture_id)
            if params.capture_wait or (tracked is not None and tracked.waits):
                await self._wait_async(output, output.capture_id)
            self.results(output)

    async def _wait_async(self, output: "RequestOutput", parent: str) -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(done.set)

        with self._changed:
            if not self._is_complete(parent):
                self._waiters.setdefault(parent, []).append(wake)
        began = monotonic()
        while self._may_complete(parent, began):
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), LOOK_SECONDS)

    def _may_complete(self, parent: str, began: float) -> bool:
        """Whether results are missing that are worth waiting for."""
        if self._is_complete(parent):
            return False
        if not self._alive():
            self._lose(parent, "the engine died before the consumer had answered")
            return False
        # Others' results count: with many requests and a slow disk each takes long.
        if monotonic() - max(began, self._last_result) < WAIT_SECONDS:
            return True
        logger.warning(
            "Capture results of %s have not come within %.0f s", parent, WAIT_SECONDS
        )
        return False

    def _lose(self, parent: str, why: str) -> None:
        with self._changed:
            for sample in self._tracked[parent].samples.values():
                sample.lose(why, self._stages)

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """Show metrics beside the engine's, if it shows any."""
        if manager is not None:
            model = str(self._vllm_config.model_config.served_model_name)
            self._status.publish(
                CaptureMetrics(
                    model, manager.engine_indexes, sorted(self._admission.consumers)
                )
            )

    def describe(self) -> dict[str, Any]:
        """Consumers, limits and counters, as plain data."""
        counters = self._status.counters()
        with self._changed:
            # Complete results that nobody has fetched yet are not under way.
            counters["requests_under_way"] = sum(
                not tracked.complete() for tracked in self._tracked.values()
            )
        return {**self._admission.describe(), "counters": counters}

    def settle(self) -> None:
        """Wait until the engine knows the end of every request that has ended.

        What it does not know when it stops is lost. Not to be called on an event
        loop's thread.
        """
        self._send_ends.wait(SETTLE_SECONDS)

    def close(self) -> None:
        """Shut driver-side consumers down and stop listening."""
        self._drivers.close(30.0)
        self._inbox.close()

    def _is_complete(self, parent: str) -> bool:
        tracked = self._tracked.get(parent)
        return tracked is None or tracked.complete()

    def _receive(self, message: Message) -> None:
        if isinstance(message, ChunksMessage) and message.instance == LIVE:
            self._show_live(message)
        elif isinstance(message, CountersMessage):
            self._status.take(message)
        elif isinstance(message, ResultMessage):
            self._note(
                message.request_id, message.instance, message.stage, message.result()
            )

    def _show_live(self, message: ChunksMessage) -> None:
        chunks: dict[str, list[CaptureChunk]] = {}
        for part in message.chunks:
            chunks.setdefault(part.request_id, []).append(part.chunk())
        for request_id, rows in chunks.items():
            with self._changed:
                owner = self._owner.get(request_id)
            if owner is not None:
                self._live.put(*owner, rows)

    def _note(
        self, request_id: str, instance: str, stage: int, result: CaptureResult
    ) -> None:
        with self._changed:
            owner = self._owner.get(request_id)
            if owner is None:
                return
            parent, index = owner
            tracked = self._tracked[parent]
            self._last_result = monotonic()
            sample = tracked.samples[index]
            sample.results.setdefault(instance, {})[stage] = result
            if len(sample.results[instance]) == self._stages:
                self._status.finalized(instance, monotonic() - sample.ended_at)
            if tracked.complete():
                self._claims.release(parent)
                for wake in self._waiters.pop(parent, []):
                    wake()
                self._changed.notify_all()
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget complete results that nobody has fetched, oldest first."""
        if len(self._tracked) <= KEPT_RESULTS:
            return
        for parent, tracked in list(self._tracked.items()):
            if tracked.complete():
                self._forget(parent)
                if len(self._tracked) <= KEPT_RESULTS:
                    return

    def _forget(self, parent: str) -> None:
        self._claims.release(parent)
        self._tracked.pop(parent, None)
        self._live.close(parent)
        for request_id in [r for r, (p, _) in self._owner.items() if p == parent]:
            del self._owner[request_id]
