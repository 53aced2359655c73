# SPDX-License-Identifier: Apache-2.0
"""`WorkerCapture`, the capture of one worker process, called by the model runner."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from vllm.config.capture import prepare_folder
from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import CaptureProgress
from vllm.v1.capture.capabilities import (
    ConsumerCapabilities,
    consumer_capabilities,
    row_encoder,
    truncates,
)
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.delivery.spill import SpillStore
from vllm.v1.capture.dispatch.dispatcher import PACKET_BYTES, Dispatcher
from vllm.v1.capture.dispatch.request import (
    LAYER_CONVENTION,
    Answer,
    CapturedRequest,
)
from vllm.v1.capture.dispatch.row_store import RowStore
from vllm.v1.capture.dispatch.step_buffer import StagedStep
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.registry import (
    as_sink,
    build_consumer,
    check_folders,
    consumer_class,
)
from vllm.v1.capture.results import GroupedRows
from vllm.v1.capture.shutdown import flush_seconds
from vllm.v1.capture.staging.ring import Parts, Segment, Staging
from vllm.v1.capture.staging.slot_mapping import SlotMapping
from vllm.v1.capture.transport.remote_sink import ForwardingSink, LiveSink
from vllm.v1.capture.transport.zmq_channel import INBOXES, Outbox, ResultMessage
from vllm.v1.capture.types import CaptureContext, CaptureResult, contexts_of
from vllm.v1.capture.worker.row_reader import RowReader
from vllm.v1.capture.worker.stats_reporter import Reporter
from vllm.v1.residual.capture_plan import LIVE, CaptureEnd, CapturePlan
from vllm.v1.residual.capture_step import StoreChange
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.row_blocks import LocalGroup, local_groups
from vllm.v1.residual.step_layout import Layout, PlacedStep, StepLayout, num_alternating
from vllm.v1.residual.step_view import StepView, TrueStarts
from vllm.v1.residual.tap import NO_SHAPES, Shapes, Tap, other_widths

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

SWITCH_SECONDS = 5e-4
"""For how long a thread may keep the interpreter from another that waits for it.

By default 5 ms, in which the engine's thread can wait for those that distribute rows.
Throughput over plain turns on an H100 with 13 GB of rows and a readout in 2.7 s
(`benchmarks/keep_when.py`), three pairs: 0.692 and 0.761, 0.662 and 0.765, 0.712 and
0.724; of plain turns no difference beyond their spread of 3 %.
"""
STEPS_UNTIL_KNOWN = 3
"""Steps of which rows are held whose values are not on the host yet."""
LARGE_STEP_PARTS = 8
"""Parts in which the rows of a large step are copied while it is computed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks of this worker process."""

    tensor_rank: int
    pipeline_rank: int
    pipeline_size: int


class WorkerCapture:
    """Assigns staging rows to captured tokens and passes the rows to consumers.

    All methods are called on the engine's thread. Per step: `plan_step`, `begin_step`,
    the forward pass, `end_step`. On tensor-parallel ranks other than 0 the taps exist,
    so that all ranks record equal CUDA graphs, but no rows are captured.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        stage: Stage,
        taps: Sequence[Tap],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        readouts: RowReader | None = None,
        shapes: Shapes = NO_SHAPES,
    ) -> None:
        config = self._config = vllm_config.capture_config
        BUDGET.limit = config.host_memory_bytes + config.store_bytes
        max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._stage = stage
        self._columns = {tap: column for column, tap in enumerate(taps)}
        self._takes_rows = stage.tensor_rank == 0
        step_rows = config.rows_per_step(width * dtype.itemsize)
        self.readouts = readouts
        self._outbox = Outbox()
        self._lanes = self._open_lanes(vllm_config) if self._takes_rows else {}
        if self._lanes:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        takers = [lane.can for name, lane in self._lanes.items() if name != LIVE]
        encoder = row_encoder(takers, width, dtype, device)
        # Ranks that take no rows need something to pass to the taps.
        ring_rows, scratch_rows = (
            (2 * step_rows, step_rows) if self._takes_rows else (1, 0)
        )
        self._staging = Staging(
            ring_rows,
            width,
            dtype,
            device,
            scratch_rows=0 if readouts is None else scratch_rows,
            encoder=encoder,
        )
        self._hands_on: tuple[int, bool] = -1, False
        """Number of a layout, and whether any of its rows leave the device."""
        self._first_row = 0
        """The first staging row of the step."""
        self._view: StepView | None = None
        self._slots = SlotMapping(len(taps), max_rows, device)
        self._vllm_config = vllm_config
        self.addresses = {
            tap: self._slots.of_taps[column].data_ptr()
            for tap, column in self._columns.items()
        }
        """The address that identifies the op of each tap, as in `Launch`."""
        widths = {
            self._columns[tap]: size
            for tap, size in other_widths(shapes, taps, width).items()
        }
        self._placement = StepLayout(
            list(self.addresses.values()),
            step_rows,
            widths,
            num_alternating(vllm_config),
        )
        if widths and encoder is not None:
            raise ValueError(
                f"hook_points={config.optional_points}: a consumer encodes rows on the "
                "device, and some of these points are not as wide as the stream; leave "
                "one of the two out"
            )
        self._plans: dict[str, CapturePlan] = {}
        self._delivered: set[str] = set()
        """Requests of which a consumer gets rows of this stage."""
        self._failures: dict[str, str] = {}
        """Requests whose capture has failed in a step, with the reasons."""
        self._placed: PlacedStep | None = None
        self._segment: Segment | None = None
        self._live: set[str] = set()
        """Requests whose rows are passed on after each step."""
        self._held_rows: dict[str, int] = {}
        """By request with held rows: how many it holds while it decodes."""
        self._true_starts: TrueStarts | None = None
        self._step = 0
        self._early = frozenset(
            name for name, lane in self._lanes.items() if lane.can.truncates
        )
        self._at_once = {LIVE} | {
            name for name in self._early if not self._lanes[name].can.batches_steps
        }
        """Readers whose rows are passed on after each step."""
        self._common = {
            "model": vllm_config.model_config.served_model_name
            or vllm_config.model_config.model,
            "layer_convention": LAYER_CONVENTION,
            "hidden_size": width,
            "dtype": str(dtype).removeprefix("torch."),
            "pipeline_parallel_rank": stage.pipeline_rank,
            "pipeline_parallel_size": stage.pipeline_size,
        }
        self._dispatcher = Dispatcher(
            self._staging,
            self._lanes,
            # Packets close to the queue's bound would exceed it.
            min(PACKET_BYTES, config.dispatch_queue_bytes // 8),
            self._open_store(encoder is not None),
        )
        self._reporter = Reporter(
            vllm_config.parallel_config.data_parallel_index,
            stage.pipeline_rank,
            self._lanes,
            self._outbox,
            self._staging.trim,
            None if readouts is None else readouts.counters,
        )

    def tensors(self, tap: Tap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors of a tap: its slots, the base they count from, staging memory.

        Returns:
            Slots `[max_tokens]` int32, base `[1]` int32, and rows `[rows, hidden_size]`
            in the dtype of the stream, all on the device.

        """
        slots = self._slots.of_taps[self._columns[tap]]
        return slots, self._slots.base, self._staging.rows

    @property
    def staging_facts(self) -> dict[str, int]:
        """The rank of this process, and the bytes of its staging memory."""
        return {
            "stage": self._stage.pipeline_rank,
            "tensor_rank": self._stage.tensor_rank,
            "device_bytes": self._staging.rows.nbytes,
        }

    def summary(self) -> str:
        """One line for the log: consumers, limits and the overload policy."""
        config = self._config
        rows, mib = self._staging.ring.num_rows, 1 << 20
        spill = f" of {config.spill_max_bytes // mib} MiB in {config.spill_folder}"
        return (
            f"capture by {sorted(self._lanes.keys() - {LIVE})}, up to {rows // 2} rows "
            f"a step in {self._staging.rows.nbytes // mib} MiB of staging memory; per "
            f"consumer {config.dispatch_queue_size} packets of rows with "
            f"{config.dispatch_queue_bytes // mib} MiB may wait, then "
            f"{config.overload_policy}{spill * (config.overload_policy == 'spill')}"
        )

    def _open_lanes(self, vllm_config: "VllmConfig") -> dict[str, SinkLane]:
        config = vllm_config.capture_config
        forward = partial(
            ForwardingSink, stage=self._stage.pipeline_rank, outbox=self._outbox
        )
        sinks: dict[str, Any] = {}
        built: dict[str, ConsumerCapabilities] = {}
        for entry in config.consumers:
            name, kind = entry.instance_name, consumer_class(entry.name)
            if kind.location == "driver":
                # The instance lives in the front end.
                sinks[name] = forward(name, truncates=truncates(kind))
                continue
            consumer = build_consumer(entry, vllm_config)
            built[name] = consumer_capabilities(consumer)
            sinks[name] = as_sink(consumer)
        check_folders(built)
        for name in config.driver_instances:
            sinks[name] = forward(name, truncates=name in config.driver_truncating)
        sinks[LIVE] = LiveSink(LIVE, self._stage.pipeline_rank, self._outbox)
        spill = None
        if config.overload_policy == "spill":
            prepare_folder(config.spill_folder)
            spill = SpillStore(config.spill_folder, config.spill_max_bytes)
        return {
            name: SinkLane(
                name,
                sink,
                config.dispatch_queue_bytes,
                config.dispatch_queue_size,
                # Live rows may always be dropped: the consumer gets them as well.
                "drop" if name == LIVE or config.overload_policy == "drop" else "block",
                None if name == LIVE else spill,
                built[name].told if name in built else None,
            )
            for name, sink in sinks.items()
        }

    def _open_store(self, encodes: bool) -> RowStore | None:
        """The rows of the activation store, if there is one."""
        config = self._config
        if not (config.store_bytes and self._takes_rows):
            return None
        if encodes:
            raise ValueError(
                f"activation_store_gb={config.store_bytes / 1e9:g}: a consumer encodes "
                "rows on the device, and encoded rows are not stored; leave one of the "
                "two out"
            )
        return RowStore(Path(config.store_path) if config.store_path else None)

    def store(self, changes: Sequence[StoreChange]) -> None:
        """Change what the activation store has, before a step with its requests."""
        if changes and self._takes_rows:
            self._dispatcher.change_store(changes, self._step + 1)

    def add_request(
        self,
        req_id: str,
        plan: CapturePlan,
        prompt_token_ids: Sequence[int] | None,
        client_specs: Mapping[str, Any] | None,
        max_tokens: int | None = None,
        adapter: int = 0,
    ) -> None:
        """Start to capture a request; ignored if known, as after a preemption.

        Args:
            req_id: its internal id.
            plan: its capture plan.
            prompt_token_ids: None if the prompt was given as embeddings.
            client_specs: `SamplingParams.capture`, by instance.
            max_tokens: how many tokens it may generate.
            adapter: the number of its LoRA adapter; 0 without one.

        """
        if req_id in self._plans:
            return
        self._plans[req_id] = plan
        try:
            groups = local_groups(plan, self._columns, self._may_hold(req_id, plan))
            prompt = plan.num_prompt_tokens
            self._placement.add(req_id, groups)
            if any(group.readers for group in groups):
                self._delivered.add(req_id)
            if self._takes_rows:
                self._reporter.addresses.setdefault(plan.reply_to, False)
            if plan.lanes:
                specs = client_specs or {}
                self._open(req_id, plan, groups, prompt_token_ids, specs, max_tokens)
            if plan.readouts is not None and self.readouts is not None:
                self.readouts.add_request(
                    req_id, plan.readouts, groups, prompt, adapter
                )
        except Exception as error:
            logger.exception("The capture of %s could not begin", req_id)
            self._failures[req_id] = f"capture failed: {described(error)}"
            self._placement.remove(req_id)

    def _may_hold(self, req_id: str, plan: CapturePlan) -> bool:
        """Whether rows of a request wait on the device until their values are known.

        Only if there is room for all of them: otherwise most would leave before.
        """
        # Values are computed in the last stage, and positions behind drafts assumed.
        drafts = self._vllm_config.speculative_config is not None
        elsewhere = self._stage.pipeline_size > 1 or self.readouts is None
        if elsewhere or drafts or not plan.keeping_tokens:
            return False
        num_rows = (plan.wait + STEPS_UNTIL_KNOWN) * plan.num_taps
        most = self._config.rows_per_step(self._staging.rows[:1].nbytes)
        if sum(self._held_rows.values()) + num_rows > most:
            return False
        self._held_rows[req_id] = num_rows
        return True

    def _open(
        self,
        req_id: str,
        plan: CapturePlan,
        groups: tuple[LocalGroup, ...],
        prompt_token_ids: Sequence[int] | None,
        client_specs: Mapping[str, Any],
        max_tokens: int | None,
    ) -> None:
        """Prepare to deliver rows, or results of readouts, of a request."""
        if self._staging.requests is not None:
            self._staging.requests.open(req_id, plan.num_prompt_tokens, groups)
        lanes = plan.lanes
        if not self._at_once.isdisjoint(lanes):
            self._live.add(req_id)
        if self._takes_rows:
            if client_specs:
                self._tell_specs(req_id, plan, client_specs, max_tokens)
            for name in lanes:
                sink = self._lanes[name].sink
                if isinstance(sink, ForwardingSink):
                    sink.route(req_id, plan.reply_to)
            if any(group.held for group in groups):
                self._dispatcher.held.open(req_id, plan.wait)
            self._dispatcher.open(
                CapturedRequest(
                    req_id,
                    plan,
                    groups,
                    prompt_token_ids,
                    self._common,
                    client_specs,
                    self._early,
                    max_tokens,
                    self._staging.host_rows.dtype,
                    takes_readouts=self._is_last_stage,
                    may_skip=frozenset(
                        name
                        for name in lanes
                        if not self._lanes[name].remembers
                        and not isinstance(self._lanes[name].sink, ForwardingSink)
                    ),
                )
            )

    def _tell_specs(
        self,
        req_id: str,
        plan: CapturePlan,
        specs: Mapping[str, Any],
        max_tokens: int | None,
    ) -> None:
        """Queue the request's specs for the consumers here that need them."""

        def context() -> CaptureContext:
            return contexts_of(self._vllm_config)(
                req_id,
                plan.num_prompt_tokens,
                max_tokens=max_tokens,
                num_samples=plan.num_samples,
            )

        for name in specs.keys() & set(plan.instances):
            self._lanes[name].open(req_id, specs[name], context)

    def end_requests(self, ends: Sequence[CaptureEnd]) -> None:
        """Stop capturing requests that have ended, and deliver their last rows."""
        ended = []
        for end in ends:
            plan = self._plans.get(end.request_id)
            failure = self._failures.get(end.request_id)
            self._forget(end.request_id)
            alone = plan is not None and len(plan.lanes) == 1
            alone = alone and not self._config.store_bytes  # It has the rows as well.
            answer = partial(self._answer, end.reply_to, end.request_id, alone)
            ended.append((replace(end, error=failure), answer))
            if self._staging.requests is not None:
                self._staging.requests.close(end.request_id)
            self._live.discard(end.request_id)
        if self._takes_rows:
            self._dispatcher.end(ended)

    def end_reading(self, finished: Iterable[str]) -> None:
        """Forget requests of which no consumer gets anything, once they have finished.

        Others wait for their end, which says which of their rows are valid.
        """
        for req_id in finished:
            plan = self._plans.get(req_id)
            if plan is not None and not plan.lanes:
                self._forget(req_id)

    def _forget(self, req_id: str) -> None:
        self._plans.pop(req_id, None)
        self._held_rows.pop(req_id, None)
        self._delivered.discard(req_id)
        self._failures.pop(req_id, None)
        self._placement.remove(req_id)
        if self.readouts is not None:
            self.readouts.remove(req_id)

    @property
    def _is_last_stage(self) -> bool:
        """Whether this stage has the readouts, whose results it gives to consumers."""
        return self._stage.pipeline_rank == self._stage.pipeline_size - 1

    def report_to(self, address: str) -> None:
        """Report counters to the front end at `address` from now on."""
        if self._takes_rows:
            self._reporter.addresses.setdefault(address, False)

    def note_reforwarded(self, tokens: int) -> None:
        """Count cached tokens that the step recomputes because they are captured."""
        if self._stage.pipeline_rank == 0:
            self._reporter.add_reforwarded(tokens)

    def _given_up(self, req_id: str, plan: CapturePlan) -> tuple[CaptureEnd, Answer]:
        """The end of a request that is still captured when the engine stops: failed."""
        error = "the engine stopped before the request had finished"
        end = CaptureEnd(
            req_id, plan.reply_to, [], 0, "abort", list(plan.instances), error=error
        )
        return end, partial(self._answer, plan.reply_to, req_id, False)

    def _answer(
        self,
        reply_to: str,
        request_id: str,
        alone: bool,
        instance: str,
        result: CaptureResult,
    ) -> None:
        """Send a result; `alone`: nobody else reads the request's rows."""
        sink = self._lanes[instance].sink
        if isinstance(sink, ForwardingSink) and sink.passed_on(request_id):
            return
        stage, rows = self._stage.pipeline_rank, result.payload
        inbox = INBOXES.get(reply_to)
        # Several readers' rows share memory, and a caller may write into its own: then
        # it gets a copy, or a private mapping, as it does from another process.
        if inbox is not None and alone and isinstance(rows, GroupedRows):
            how = result.status, result.error
            inbox(ResultMessage(request_id, instance, stage, *how, rows))
        else:
            message = ResultMessage.of(request_id, instance, stage, result)
            self._outbox.send(reply_to, message)

    @property
    def is_idle(self) -> bool:
        """Whether no request is captured."""
        return self._placement.is_empty

    def plan_step(self, view: StepView) -> frozenset[int]:
        """Lay out the rows that a step captures.

        Every rank of a stage gets the same result.

        Returns:
            The addresses of the ops that must launch; empty if nothing is captured.

        """
        self._step += 1
        placed = self._placed = self._placement.place(view)
        self._view = view
        if placed is None:
            self._true_starts = None
            return frozenset()
        # Read now, because the forward pass advances them.
        self._true_starts = TrueStarts.of(view)
        return placed.layout.launches

    def fail(self, view: StepView, error: Exception) -> None:
        """End the captures of a step's requests because of an error being handled.

        The requests continue without: their results have the error.
        """
        captured = [one for one in view.req_ids if one in self._placement]
        logger.exception("Capture failed for %d requests of a step", len(captured))
        for req_id in captured:
            self._failures[req_id] = f"capture failed: {described(error)}"
            self._placement.remove(req_id)
        if self.readouts is not None:
            self.readouts.fail(view, error)
        self._placed = None

    def begin_step(self, num_rows: int) -> None:
        """Write the slots that the forward pass reads.

        Args:
            num_rows: rows of the step's tensors, padding included.

        """
        if not self._takes_rows:
            return
        try:
            self._begin(num_rows)
        except Exception as error:
            assert self._view is not None, "a step begins that was not planned"
            self.fail(self._view, error)
            self._slots.clear()
            CaptureProgress.active = None
            segment, self._segment = self._segment, None
            if segment is not None:
                self._staging.ring.give_back(segment)

    def _begin(self, num_rows: int) -> None:
        if self._placed is None:
            self._slots.clear()
            self._dispatcher.hand_on()
            return
        layout = self._placed.layout
        if self._leave_the_device(layout):
            self._segment = self._dispatcher.reserve(layout.num_rows)
            self._first_row = self._segment.start
            if self._staging.is_large(layout.num_rows - layout.num_held):
                num_ops = len(layout.launches)
                CaptureProgress.active = CaptureProgress(num_ops, LARGE_STEP_PARTS)
        else:
            self._dispatcher.hand_on()
            self._first_row = self._staging.scratch
        self._slots.write(layout, self._first_row, num_rows)

    def _leave_the_device(self, layout: Layout) -> bool:
        """Whether any row of a step is delivered; if so, the step needs a ring segment.

        Rows that only readouts use are overwritten by the next step.
        """
        if self.readouts is None:
            return True
        if self._hands_on[0] != layout.number:
            # Requests that have ended may still have a row, which is not delivered.
            hands_on = any(
                not self._delivered.isdisjoint(block.decoding)
                or any(pick[0] in self._delivered for pick in block.picks)
                for block in layout.blocks
            )
            self._hands_on = layout.number, hands_on
        return self._hands_on[1]

    def end_step(self, attention: Any = None) -> None:
        """Called after the forward pass is queued on the device: read and add its rows.

        Args:
            attention: upstream's metadata, by name of the attention layer.

        """
        placed, self._placed = self._placed, None
        progress, CaptureProgress.active = CaptureProgress.active, None
        if self.readouts is not None and self._view is not None:
            rows, first = self._staging.rows, self._first_row
            self.readouts.run(placed, self._view, rows, first, attention)
            if not self._dispatcher.held.is_empty:
                reading = self._dispatcher.held.reading(self._view)
                self.readouts.tell(reading.tell)
        if placed is None or self._segment is None:
            return
        staged = StagedStep(self._step, placed, self._segment, self._true_starts)
        self._segment = None
        try:
            parts = [] if progress is None else self._parts(progress)
            self._dispatcher.add(staged, self._live, parts)
        except Exception as error:
            assert self._view is not None, "a step ends that was not planned"
            self.fail(self._view, error)
            self._dispatcher.lose(staged)

    def _parts(self, progress: CaptureProgress) -> Parts:
        columns = {a: self._columns[tap] for tap, a in self.addresses.items()}
        return [
            ({columns[address] for address in addresses}, event)
            for addresses, event in progress.parts
        ]

    def send(self) -> None:
        """Start copying the rows that are still on the device."""
        self._dispatcher.leave_device()

    def close(self) -> None:
        """Deliver pending rows and shut down the consumers.

        Captures of requests that have not ended fail.
        """
        left = {req_id: plan for req_id, plan in self._plans.items() if plan.lanes}
        if left:
            logger.error(
                "The engine stops while %d requests are being captured; their captures "
                "fail: %s",
                len(left),
                sorted(left)[:8],
            )
        if self._takes_rows:
            self._dispatcher.end([self._given_up(*one) for one in left.items()])
        deadline = monotonic() + flush_seconds()
        self._dispatcher.close(deadline - monotonic())
        self._staging.close()
        for lane in self._lanes.values():
            lane.close(max(deadline - monotonic(), 0.0))
        self._reporter.close()
        self._outbox.close()
