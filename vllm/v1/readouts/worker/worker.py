# SPDX-License-Identifier: Apache-2.0
"""Computes the readouts of a step from its staged rows in a worker process."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch
from torch import nn

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tp_group,
)
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readouts.worker.agreement import failing_together
from vllm.v1.readouts.worker.attention import AttentionPatterns, asked
from vllm.v1.readouts.worker.attribution import Attribution
from vllm.v1.readouts.worker.head import ELSEWHERE, Head
from vllm.v1.readouts.worker.head_parts import HeadParts
from vllm.v1.readouts.worker.jobs import (
    ROWS,
    Arrays,
    Entry,
    Indices,
    Job,
    JobKey,
    JobSet,
    ReadingRequest,
    make_job_set,
    no_rows,
    places_of,
    reads,
)
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.operations import (
    Operations,
    inline_probe,
    part_of,
    reduce_rows,
)
from vllm.v1.readouts.worker.pending import JobResult, PendingReadouts
from vllm.v1.readouts.worker.stages import (
    SEND,
    Joined,
    JoinedSet,
    ReceivedStageMessage,
    Share,
    StageMessage,
    Stages,
    make_joined_set,
)
from vllm.v1.residual.capture_plan import scheduling_lag, widened
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import (
    Fired,
    KeepWhen,
    Readout,
    ReadoutCounters,
    ReadoutPlan,
)
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.sizes import torch_dtype
from vllm.v1.residual.step_layout import PlacedStep, num_alternating
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

SHARED = ("lens", "attention")
"""Operations in whose collectives the ranks without rows take part."""

RowsOfJob: TypeAlias = tuple[Job, torch.Tensor | None]
"""A job with its rows `[R, hidden_size]`; None on ranks that have no rows."""
Work: TypeAlias = tuple[Job, torch.Tensor | Arrays | str]
"""A job with its rows `[R, hidden_size]`, with its result if that was computed in line,
or with the text of an error."""


class WorkerReadouts:
    """Computes readouts on the device. Engine thread only.

    Rows are copied out of staging memory on the stream of the forward pass, so that the
    next step can reuse the memory. The computation itself runs on a side stream, except
    what tensor-parallel ranks compute together.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        modules: WorkerModules,
        model: nn.Module,
        last_layer: nn.Module | None,
        device: torch.device,
        attention: Mapping[int, Any],
        heads: HeadParts,
    ) -> None:
        """Find the model's head.

        Args:
            vllm_config: the engine's configuration.
            modules: the readout modules of this worker.
            model: the loaded model.
            last_layer: a module of the last decoder block; None if another pipeline
                stage has it.
            device: the device of the model.
            attention: upstream's attention layers with the point `q`, by layer.
            heads: the linear forms of attention layers.

        """
        parallel = vllm_config.parallel_config
        self.modules = modules
        vocab_size = vllm_config.model_config.get_vocab_size()
        adapts = vllm_config.lora_config is not None
        self._device = device
        self._width = vllm_config.model_config.get_hidden_size()
        dtype = torch_dtype(vllm_config.model_config)
        self._shared = parallel.tensor_parallel_size > 1
        rows = torch.empty(0, self._width, dtype=dtype, device=device)
        records = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        self.head = Head(
            model, last_layer, vocab_size, rows, adapts, self._shared, records
        )
        self._lag = scheduling_lag(vllm_config)
        known = vllm_config.speculative_config is None
        self.patterns = AttentionPatterns(attention, self._width, device, known)
        self._has_rows = get_tensor_model_parallel_rank() == 0
        self.head.keeps_logits = self._has_rows
        self._stages = Stages.of(vllm_config, get_pp_group().rank_in_group)
        self._joined: dict[str, Joined] = {}
        """By request; of the last stage: readouts of rows that stages send."""
        self._split: dict[str, dict[str, tuple[Tap, ...]]] = {}
        """By request and name: taps of readouts that several stages compute."""
        self._received: ReceivedStageMessage | None = None
        self._outgoing = StageMessage()
        self._sent: dict[str, Any] = {}
        self._requests: dict[str, ReadingRequest] = {}
        self._rules: dict[str, tuple[KeepWhen, ...]] = {}
        """By request, what it keeps rows around."""
        self._heads = heads
        self._attribution = Attribution(self.head, model, self._width, dtype, heads)
        self._operations = Operations(
            vllm_config, self.head, self._attribution, self._requests, device
        )
        most = num_alternating(vllm_config)
        self._job_sets: deque[JobSet] = deque(maxlen=most)
        self._joined_sets: deque[JoinedSet] = deque(maxlen=most)
        self._job_set: JobSet | None = None
        """Of the current step."""
        self._pending: PendingReadouts | None = None
        self._beside: torch.cuda.Stream | None = None
        # A later step may load other adapters while a lens uses them.
        if device.type == "cuda" and self._has_rows and not adapts:
            self._beside = torch.cuda.Stream(device)
        self.on_rows: Callable[[Sequence[RowsOfJob], int], None] | None = None
        """Takes the rows of consumers that run within the step, on every rank of the
        stage; `further` is added to the positions of the jobs' entries."""
        self.counters: dict[str, ReadoutCounters] = {}
        """By kind of readout; read by the thread that reports them."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    @property
    def refusals(self) -> dict[str, Any]:
        """As `Refusals`; without `lens` on ranks without a head."""
        found: dict[str, Any] = {
            "attention": self.patterns.refusals,
            "projections": self._heads.layers,
        }
        if self._shared or len(self._stages.starts) > 1:
            found["heads"] = (
                "the output projections are divided among ranks, or in other stages of "
                "the pipeline; capture z, or use one process"
            )
        if self.head.refusal != ELSEWHERE:
            found["lens"] = self.head.refusal
            found["attribution"] = self._attribution.refusal
        return found

    def add_request(
        self,
        req_id: str,
        plan: ReadoutPlan,
        groups: tuple[LocalGroup, ...],
        num_prompt_tokens: int,
        adapter: int = 0,
    ) -> None:
        """Add a request with readouts when it is first scheduled.

        Args:
            req_id: its internal id.
            plan: its readouts.
            groups: the taps that are staged for it here.
            num_prompt_tokens: length of its prompt.
            adapter: the number of its LoRA adapter; 0 without one.

        """
        local = {tap for group in groups for tap in group.taps}
        if any(group.held for group in groups):
            self._rules[req_id] = plan.keep_when
        readouts: list[Readout] = []
        keys: list[JobKey] = []
        joined: dict[str, tuple[Readout, JobKey]] = {}
        for one in plan.readouts:
            if not self._has_module(one):
                # It was unregistered or replaced meanwhile; the final result reports
                # the missing tokens.
                continue
            if self._lag:  # The scheduler drops what is beside the ranges in the end.
                ranges = widened(one.ranges, num_prompt_tokens, self._lag)
                one = msgspec.structs.replace(one, ranges=ranges)
            share = Share((one,))
            if len(self._stages.starts) > 1:
                share = self._stages.share(one, local)
            readouts += share.here
            keys += [self._key(part) for part in share.here]
            if share.sent is not None:
                readouts.append(share.sent)
                keys.append(SEND)
            if share.joined is not None:
                joined[one.name] = share.joined, self._key(share.joined)
        self._requests[req_id] = ReadingRequest(
            tuple(readouts),
            tuple(places_of(one.staged, groups) for one in readouts),
            tuple(keys),
            num_prompt_tokens,
            {},
            adapter=adapter,
        )
        if self._stages.is_last and len(self._stages.starts) > 1:
            self._joined[req_id] = joined
            parted = [one for one in plan.readouts if len(self._stages.parts(one)) > 1]
            if parted:
                self._split[req_id] = {one.name: one.taps for one in parted}

    def remove(self, req_id: str) -> None:
        """Drop a finished request."""
        self._requests.pop(req_id, None)
        self._rules.pop(req_id, None)
        self._joined.pop(req_id, None)
        self._split.pop(req_id, None)
        self._joined_sets.clear()

    def receive(self, tensors: dict[str, Any]) -> None:
        """Take what earlier stages add to a step's intermediate tensors."""
        self._received = ReceivedStageMessage.taken(tensors)

    def send(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A step's intermediate tensors, with what the last stage needs."""
        outgoing, self._outgoing = self._outgoing, StageMessage()
        self._sent = outgoing.put(tensors)  # Kept until the next step's are sent.
        return self._sent

    def _has_module(self, readout: Readout) -> bool:
        named = readout.kind in ("probe", "lens", "sae") and readout.module
        return not named or self.modules.has(named, readout.fingerprint)

    def _key(self, readout: Readout) -> JobKey:
        """The key of a readout's job: the operation, then what its readouts share."""
        modules = self.modules
        match readout.kind:
            case "custom" if readout.step:
                return "step", readout.module, len(readout.taps)
            case "probe" if readout.probe is not None:
                module = inline_probe(readout.probe, self._device)
                same = len(module.bias), module.activation, module.cosine
                mixes = module.activation != "jumprelu"
                # Probes of several requests are stacked if size and activation agree.
                return ("probes", *same, *(() if mixes else (id(module),)))
            case "probe":
                return "probe", modules[readout.module]
            case "lens":
                translator = modules[readout.module] if readout.module else None
                return "lens", readout.top_k, readout.tokens, translator
            case "attribution":
                return "attribution", self._attribution.directions(readout.tokens)
            case "sae":
                sae = modules[readout.module]
                return "sae", sae, readout.top_k, readout.features
            case "norm":
                return ("norm",)
            case "attention":
                return "attention", *asked(readout)
            case "rows" if readout.reduce != "none":
                return "reduce", readout.reduce, len(readout.taps)
            case "rows":
                return ROWS
        return "custom", readout.module, len(readout.taps)

    def run(
        self,
        placed: PlacedStep | None,
        view: StepView,
        staging: torch.Tensor,
        first_row: int,
        attention: Any = None,
    ) -> None:
        """Queue the readouts of a step after its forward pass.

        Called with the same step on every rank of a pipeline stage. An error is the
        result of the step's readouts, or of those of its job.

        Args:
            placed: the step's layout, with its shift; None if this stage has no rows.
            view: the step's batch.
            staging: `[S, hidden_size]`, the staging memory.
            first_row: the step's first row in `staging`.
            attention: upstream's metadata, by name of the attention layer.

        """
        self.patterns.begin(attention, view.req_ids)
        self._operations.view = view
        try:
            self._run(placed, view, staging, first_row)
        except Exception as error:
            logger.exception("The readouts of a step failed")
            self.fail(view, error)

    def fail(self, view: StepView, error: Exception) -> None:
        """Let an error be the result of a step's readouts."""
        self._job_sets.clear()
        self._joined_sets.clear()
        self._outgoing = StageMessage()
        starts = _starts(view)
        entries = [
            Entry(req_id, readout, starts[req_id], count, 0, no_rows(count, 1))
            for req_id, count in zip(view.req_ids, view.num_scheduled.tolist())
            if req_id in self._requests
            for readout in self._requests[req_id].readouts
            if reads(readout, starts[req_id], count)
        ]
        errors = dict.fromkeys(range(len(entries)), described(error))
        self._pending = None
        if entries and self._has_rows:
            result = JobResult(entries, 0, {}, errors)
            self._pending = PendingReadouts([result], starts)

    def _run(
        self,
        placed: PlacedStep | None,
        view: StepView,
        staging: torch.Tensor,
        first_row: int,
    ) -> None:
        received, self._received = self._received, None
        message = StageMessage() if received is None else received.opened()
        self._job_set, further = None, 0
        if placed is not None and self._requests:
            self._job_set = self._job_set_of(placed, view)
            further = placed.shift - self._job_set.shift
        job_set = self._job_set
        jobs = [] if job_set is None else job_set.jobs
        self._call_step_consumers(jobs, staging, first_row, further)
        work: list[Work] = []
        for job in jobs:
            if job.key == SEND:
                message.add_rows(job, self._sent_rows(job, staging, first_row), further)
            elif job.key[0] != "step" and (self._has_rows or job.key[0] in SHARED):
                work.append((job, self._tried(job, staging, first_row, further)))
        if not self._stages.is_last:
            message.results += self._results(work, further)
            for one in message.results:  # Custom ones may have computed on the host.
                one.arrays = {k: v.to(self._device) for k, v in one.arrays.items()}
            self._outgoing = message
        elif message:
            if job_set is None and message.places:
                further = message.places[0][0]
            work += self._joined_work(message, self._joined_set_of(message, further))
            starts = {req: at - further for req, at in _starts(view).items()}
            self._compute(work, message, further, starts)
        elif work:
            assert job_set is not None, "only a job set has jobs"
            self._compute(work, message, further, job_set.starts)

    def _job_set_of(self, placed: PlacedStep, view: StepView) -> JobSet:
        """The job set of a step, which may be that of the batch's step before."""
        for one in self._job_sets:
            if one.fits(placed):
                return one
        made = make_job_set(
            placed, self._requests, lambda: _starts(view), self._to_device
        )
        self._job_sets.append(made)
        return made

    def _joined_set_of(self, message: StageMessage, further: int) -> JoinedSet:
        """The joined set of a step, which may be that of the batch's step before."""
        for one in self._joined_sets:
            if one.fits(message.places, further):
                return one
        made = make_joined_set(message.places, self._joined, further, self._to_device)
        self._joined_sets.append(made)
        return made

    def _call_step_consumers(
        self, jobs: Sequence[Job], staging: torch.Tensor, first_row: int, further: int
    ) -> None:
        own = [job for job in jobs if job.key[0] == "step"]
        if own and self.on_rows is not None:
            has = self._has_rows
            rows = [self._rows(one, staging, first_row) if has else None for one in own]
            self.on_rows(list(zip(own, rows, strict=True)), further)

    def _joined_work(self, message: StageMessage, joined: JoinedSet) -> list[Work]:
        """The jobs of rows that stages have sent, in equal order on all ranks."""
        work: list[Work] = []
        for job, index in joined.jobs:
            if self._has_rows:
                try:
                    work.append((job, joined.rows(message.rows, index)))
                except Exception as error:
                    work.append((job, _problem(job, error)))
            elif job.key[0] == "lens":
                work.append((job, self.head.no_rows(job.num_rows)))
        return work

    def _compute(
        self,
        work: Sequence[Work],
        message: StageMessage,
        further: int,
        starts: Mapping[str, int],
    ) -> None:
        """Queue the operations of a step, and copies of all results to the host.

        Args:
            work: the jobs of the step, with their rows.
            message: has the results of earlier stages.
            further: is added to the positions of the jobs' entries.
            starts: token position of each request's first row in the step, less
                `further`.

        """
        if self._shared:
            # In line: on two streams collectives could have another order on each rank.
            work = [(job, self._of_ranks(job, rows)) for job, rows in work]
        if not self._has_rows:
            return
        done = None
        stream: AbstractContextManager[object] = nullcontext()
        remains = any([isinstance(rows, torch.Tensor) for _, rows in work])
        beside = self._beside if remains else None
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream())
            stream = torch.cuda.stream(beside)
        kept = [*work, *(one.arrays for one in message.results)]
        with stream:
            results = [*message.results, *self._results(work, further)]
            for one in results:
                one.arrays = {name: _to_host(a) for name, a in one.arrays.items()}
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record(beside or torch.cuda.current_stream())
        self._pending = PendingReadouts(
            results, starts, further, done, kept, dict(self._split)
        )

    def tell(self, told: Callable[[Fired], None]) -> None:
        """Have `told` called with what the rules of the last step keep.

        That is when its values are on the host, on the thread that collects them.
        """
        if self._pending is None:
            told(())
        else:
            self._pending.rules, self._pending.told = self._rules, told

    def take(self) -> PendingReadouts | None:
        """Remove and return the results of the last step, if it has any."""
        pending, self._pending = self._pending, None
        return pending

    def _tried(
        self, job: Job, staging: torch.Tensor, first_row: int, further: int
    ) -> torch.Tensor | Arrays | str:
        """What `_gathered` returns, or the text of its error."""
        try:
            return self._gathered(job, staging, first_row, further)
        except Exception as error:
            return _problem(job, error)

    def _gathered(
        self, job: Job, staging: torch.Tensor, first_row: int, further: int
    ) -> torch.Tensor | Arrays:
        """A job's rows `[R, hidden_size]`, or its result.

        What reduces rows or reads the KV cache is computed here, on the stream of the
        pass.
        """
        began = perf_counter()
        if job.key[0] != "reduce":
            is_pattern = job.key[0] == "attention"
            together = is_pattern and self._shared
            with failing_together() if together else nullcontext():
                if self._has_rows:
                    rows = self._rows(job, staging, first_row)
                elif is_pattern:  # Rank 0 sends them.
                    rows = staging.new_empty(len(job.index), self._width)
                else:
                    rows = self.head.no_rows(len(job.index))
            if not is_pattern:
                return rows
            assert self._job_set is not None, "only a job set has jobs"
            if self._shared:
                rows = get_tp_group().broadcast(rows, src=0)
            patterns = self.patterns.compute(job, rows, self._job_set.starts, further)
            self._count(job, len(rows), began)
            return patterns
        found = reduce_rows(job, staging, first_row)
        self._count(job, job.num_rows, began)
        for entry in job.entries:
            until = entry.start + further + entry.count
            self._requests[entry.req_id].reduced[entry.readout.name] = until
        return found

    def _sent_rows(
        self, job: Job, staging: torch.Tensor, first_row: int
    ) -> torch.Tensor | None:
        """The rows of a job that are sent on; None if this rank has none, or fails."""
        try:
            return self._rows(job, staging, first_row) if self._has_rows else None
        except Exception:
            # The last stage, whose ranks wait for each other, will notice.
            logger.exception("Rows for the last pipeline stage could not be copied")
            return None

    def _rows(self, job: Job, staging: torch.Tensor, first_row: int) -> torch.Tensor:
        """A job's rows `[R, hidden_size]`, or what it reads of each."""
        rows = staging[first_row:].index_select(0, job.index)
        return part_of(rows, job.part)

    def _of_ranks(
        self, job: Job, rows: torch.Tensor | Arrays | str
    ) -> torch.Tensor | Arrays | str:
        """What tensor-parallel ranks compute together of a job."""
        if job.key[0] != "lens" or self.head.refusal:
            return rows
        assert isinstance(rows, torch.Tensor | str), "a lens has been computed before"
        began = perf_counter()
        try:
            found = self._operations.lens_of_ranks(job, rows)
        except Exception as error:
            return rows if isinstance(rows, str) else _problem(job, error)
        self._count(job, job.num_rows, began)
        return found

    def _results(self, work: Sequence[Work], further: int) -> list[JobResult]:
        """The results of jobs, with arrays that may be on any device."""
        results = []
        for job, rows in work:
            began = perf_counter()
            result = JobResult(job.entries, further, {}, kept=job.kept)
            if not isinstance(rows, dict | str):
                try:
                    result.arrays = self._operations.compute(job, rows, result)
                except Exception as error:
                    rows = _problem(job, error)
                else:
                    self._count(job, job.num_rows, began)
            elif isinstance(rows, dict):
                result.arrays = rows
            if isinstance(rows, str):
                result.errors = dict.fromkeys(range(len(job.entries)), rows)
            results.append(result)
        return results

    def _count(self, job: Job, rows: int, began: float) -> None:
        kind = job.entries[0].readout.kind
        counters = self.counters.setdefault(kind, ReadoutCounters())
        counters.rows += rows
        counters.seconds += perf_counter() - began

    def _to_device(self, indices: Indices) -> torch.Tensor:
        return async_tensor_h2d(indices, device=self._device)


def _problem(job: Job, error: Exception) -> str:
    """The text of an error, which is being handled, for the results of a job."""
    logger.exception("Readouts of the kind %r failed", job.key[0])
    return described(error)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host; valid once the current stream has reached it."""
    if values.dtype == torch.bfloat16:
        values = values.float()  # NumPy has no bfloat16.
    if values.device.type == "cpu":
        return values.contiguous()
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _starts(view: StepView) -> Mapping[str, int]:
    return dict(zip(view.req_ids, view.num_computed.tolist()))
