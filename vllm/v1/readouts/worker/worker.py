# SPDX-License-Identifier: Apache-2.0
"""Computes the readouts of a step from its staged rows in a worker process."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import nn

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tp_group,
)
from vllm.steering.sae import SparseAutoencoder
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.staging.blocks import LocalGroup
from vllm.v1.capture.staging.step_layout import PlacedStep
from vllm.v1.capture.stats import ReadoutCounters
from vllm.v1.readouts.modules import ProbeModule, TranslatorModule
from vllm.v1.readouts.plan import Readout, ReadoutPlan, Tap
from vllm.v1.readouts.worker.custom import CustomReadouts
from vllm.v1.readouts.worker.head import Head, lens_values
from vllm.v1.readouts.worker.kinds import (
    Arrays,
    inline_probe,
    norms,
    probe_values,
    reduce_rows,
    stacked_probe_values,
)
from vllm.v1.readouts.worker.layout import Indices
from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.readouts.worker.pending import JobResult, PendingReadouts
from vllm.v1.readouts.worker.program import (
    ROWS,
    Job,
    JobKey,
    Program,
    ReadingRequest,
    make_program,
)
from vllm.v1.readouts.worker.sae import sae_values
from vllm.v1.readouts.worker.stages import (
    SEND,
    Arriving,
    Lenses,
    StageRows,
    with_received,
)
from vllm.v1.residual.step_view import StepView

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class WorkerReadouts:
    """Computes readouts on the device. Engine thread only.

    Rows are copied out of staging memory on the stream of the forward pass, so that the
    next step can reuse the memory. Without tensor parallelism the computation itself
    runs on a side stream.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        modules: WorkerModules,
        model: nn.Module,
        last_layer: nn.Module | None,
        device: torch.device,
    ) -> None:
        """Find the model's head.

        Args:
            vllm_config: the engine's configuration.
            modules: the readout modules of this worker.
            model: the loaded model.
            last_layer: a module of the last decoder block; None if another pipeline
                stage has it.
            device: the device of the model.

        """
        parallel = vllm_config.parallel_config
        self.modules = modules
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.head = Head(model, last_layer, vocab_size, device.type)
        self._device = device
        self._width = vllm_config.model_config.get_hidden_size()
        self._shared = parallel.tensor_parallel_size > 1
        self._has_rows = get_tensor_model_parallel_rank() == 0
        self._custom = CustomReadouts(vllm_config)
        self._sends = not get_pp_group().is_last_rank
        """Whether the rows that lenses read go to a later stage."""
        self._lenses: dict[str, Lenses] = {}
        """By request; of the last stage, whose rows may be of other stages too."""
        self._arriving: Arriving | None = None
        self._outgoing = StageRows()
        self._sent: dict[str, Any] = {}
        self._requests: dict[str, ReadingRequest] = {}
        self._program: Program | None = None
        self._pending: PendingReadouts | None = None
        self._beside: torch.cuda.Stream | None = None
        # Collectives on two streams could run in different orders on different ranks.
        if device.type == "cuda" and not self._shared:
            self._beside = torch.cuda.Stream(device)
        self.on_rows: Callable[[Job, torch.Tensor, int], None] | None = None
        """Takes the rows of consumers that run within the step."""
        self.counters: dict[str, ReadoutCounters] = {}
        """By kind of readout; read by the thread that reports them."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def add_request(
        self,
        req_id: str,
        plan: ReadoutPlan,
        groups: tuple[LocalGroup, ...],
        num_prompt_tokens: int,
    ) -> None:
        """Add a request with readouts when it is first scheduled."""
        local = {tap for group in groups for tap in group.taps}
        here = tuple(
            part
            for one in plan.readouts
            # If its module was unregistered meanwhile, the final result reports the
            # missing tokens.
            if self._has_module(one) and (part := _at(one, local)) is not None
        )
        if not self._sends:
            self._lenses[req_id] = {
                one.name: (one, self._key(one))
                for one in plan.readouts
                if one.kind == "lens" and not local.issuperset(one.taps)
                if self._has_module(one)
            }
        keys = tuple(self._key(one) for one in here)
        self._requests[req_id] = ReadingRequest(
            here, groups, keys, num_prompt_tokens, {}
        )

    def remove(self, req_id: str) -> None:
        """Drop a finished request."""
        self._requests.pop(req_id, None)
        self._lenses.pop(req_id, None)

    def receive(self, tensors: dict[str, Any]) -> None:
        """Take the rows of earlier stages out of a step's intermediate tensors."""
        self._arriving = Arriving.taken(tensors)

    def send(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A step's intermediate tensors, with the rows that the last stage reads."""
        outgoing, self._outgoing = self._outgoing, StageRows()
        self._sent = outgoing.put(tensors)  # Kept until the next step's are sent.
        return self._sent

    def _has_module(self, readout: Readout) -> bool:
        named = readout.kind in ("probe", "lens", "sae") and readout.module
        return not named or named in self.modules

    def _key(self, readout: Readout) -> JobKey:
        """The key of a readout's job: the operation, then what its readouts share."""
        modules = self.modules
        match readout.kind:
            case "custom" if readout.step:
                return "step", readout.module, len(readout.taps)
            case "probe" if readout.probe is not None:
                module = inline_probe(readout.probe, self._width, self._device)
                same = len(module.bias), module.activation, module.cosine
                mixes = module.activation != "jumprelu"
                # Probes of several requests are stacked if size and activation agree.
                return ("probes", *same, *(() if mixes else (id(module),)))
            case "probe":
                return "probe", modules.probe(readout.module)
            case "lens" if self._sends:
                return SEND
            case "lens":
                named = readout.module
                translator = modules.translator(named) if named else None
                return "lens", readout.top_k, readout.tokens, translator
            case "sae":
                sae = modules.sae(readout.module)
                return "sae", sae, readout.top_k, readout.features
            case "norm":
                return ("norm",)
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
    ) -> None:
        """Queue the readouts of a step after its forward pass.

        Called with the same step on every rank of a pipeline stage.

        Args:
            placed: the step's layout, with its shift; None if this stage has no rows.
            view: the step's batch.
            staging: `[S, hidden_size]`, the staging memory.
            first_row: the step's first row in `staging`.

        """
        arriving, self._arriving = self._arriving, None
        received = StageRows() if arriving is None else arriving.opened()
        self._outgoing = received if self._sends else StageRows()
        if placed is None:
            if received.places and not self._sends:
                self._compute([], [], received, 0, _starts(view))
            return
        if not self._requests:
            return
        program = self._program
        if program is None or not program.fits(placed):
            program = self._program = make_program(
                placed, self._requests, lambda: _starts(view), self._to_device
            )
        jobs = program.jobs
        if not self._has_rows:  # Other ranks take part only in the head's collectives.
            jobs = [job for job in jobs if job.key[0] == "lens"]
        if not jobs:
            return
        further = placed.shift - program.shift
        for job in jobs:
            if job.key[0] == "step" and self.on_rows is not None:
                rows = self._gathered(job, staging, first_row)
                assert isinstance(rows, torch.Tensor), "rows of a step are not reduced"
                self.on_rows(job, rows, further)
        for job in jobs:
            if job.key == SEND:
                rows = self._gathered(job, staging, first_row)
                assert isinstance(rows, torch.Tensor), "rows are sent as they are"
                self._outgoing.add(job, rows, further)
        jobs = [job for job in jobs if job.key[0] not in ("step", "send")]
        if not jobs and (self._sends or not received.places):
            return
        gathered = [self._gathered(job, staging, first_row) for job in jobs]
        known = _starts(view) if received.places else program.starts
        shifted = 0 if received.places else further
        starts = {req: at + shifted for req, at in known.items()}
        self._compute(jobs, gathered, received, further, starts)

    def _compute(
        self,
        jobs: list[Job],
        gathered: list[torch.Tensor | Arrays],
        received: StageRows,
        further: int,
        starts: Mapping[str, int],
    ) -> None:
        """Queue the operations of a step.

        Args:
            jobs: the jobs of this stage's rows.
            gathered: their rows.
            received: rows of earlier stages.
            further: is added to the positions of the jobs' entries.
            starts: token position of each request's first row in the step.

        """
        if received.places:
            jobs, gathered = with_received(
                jobs, gathered, received, self._lenses, further
            )
        results: list[JobResult] = []
        done = None
        if self._beside is None:
            results = self._results(jobs, gathered, further)
        else:
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                results = self._results(jobs, gathered, further)
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record(self._beside or torch.cuda.current_stream())
        if not self._has_rows:
            return
        self._pending = PendingReadouts(results, dict(starts), done, list(gathered))

    def take(self) -> PendingReadouts | None:
        """Remove and return the results of the last step, if it has any."""
        pending, self._pending = self._pending, None
        return pending

    def _gathered(
        self, job: Job, staging: torch.Tensor, first_row: int
    ) -> torch.Tensor | Arrays:
        """A job's rows `[R, hidden_size]`, or its result if it reduces rows."""
        if job.key[0] == "reduce":
            began = perf_counter()
            found = reduce_rows(job, staging, first_row)
            self._count(job, sum(entry.num_rows for entry in job.entries), began)
            for entry in job.entries:
                until = entry.start + entry.count
                self._requests[entry.req_id].reduced[entry.readout.name] = until
            return found
        if job.kept.get("first_row") != first_row:
            job.kept["first_row"], job.kept["index"] = first_row, job.index + first_row
        rows = staging.index_select(0, job.kept["index"])
        if self._shared and job.key[0] == "lens":
            rows = get_tp_group().broadcast(rows, src=0)
        return rows

    def _results(
        self,
        jobs: Sequence[Job],
        gathered: Sequence[torch.Tensor | Arrays],
        further: int,
    ) -> list[JobResult]:
        results = []
        for job, rows in zip(jobs, gathered):
            began = perf_counter()
            result = JobResult(job.entries, further, {})
            if isinstance(rows, torch.Tensor):
                arrays = self._answer(job, rows, result)
                self._count(job, len(rows), began)
            else:
                arrays = rows
            result.arrays = {name: _to_host(one) for name, one in arrays.items()}
            results.append(result)
        return results

    def _count(self, job: Job, rows: int, began: float) -> None:
        kind = job.entries[0].readout.kind
        counters = self.counters.setdefault(kind, ReadoutCounters())
        counters.rows += rows
        counters.seconds += perf_counter() - began

    def _answer(self, job: Job, rows: torch.Tensor, result: JobResult) -> Arrays:
        match job.key:
            case ("probe", ProbeModule() as module):
                return probe_values(module, rows)
            case ("probes", *_):
                return self._own_probes(job, rows)
            case ("lens", *_) if self.head.refusal:
                # An error of these requests: the step has others as well.
                refused = f"no lens on this model: {self.head.refusal}"
                result.errors.update(dict.fromkeys(range(len(job.entries)), refused))
                return {}
            case ("lens", top_k, tokens, translator):
                if translator is not None:
                    rows = translated(job, rows, translator)
                return lens_values(self.head, rows, top_k, tokens)
            case ("sae", SparseAutoencoder() as sae, top_k, features):
                return sae_values(sae, rows, top_k, features)
            case ("norm",):
                return norms(job, rows)
            case ("custom", *_):
                return self._custom_values(job, rows, result)
        return {"rows": rows}

    def _own_probes(self, job: Job, rows: torch.Tensor) -> Arrays:
        """Probes given in requests: a single product if each entry has one row."""
        if "probes" not in job.kept:
            job.kept["probes"] = [
                inline_probe(entry.readout.probe, self._width, self._device)
                for entry in job.entries
                if entry.readout.probe is not None
            ]
        modules = job.kept["probes"]
        if all(entry.count == 1 for entry in job.entries):
            return stacked_probe_values(modules, rows)
        parts = [
            probe_values(module, rows[entry.first : entry.first + entry.num_rows])
            for module, entry in zip(modules, job.entries)
        ]
        return {"values": torch.cat([part["values"] for part in parts])}

    def _custom_values(self, job: Job, rows: torch.Tensor, result: JobResult) -> Arrays:
        found: Arrays = {}
        for number, entry in enumerate(job.entries):
            own = rows[entry.first : entry.first + entry.num_rows]
            own = own.view(entry.count, len(entry.readout.taps), -1)
            prompt = self._requests[entry.req_id].num_prompt_tokens
            values = self._custom.compute(entry, own, prompt)
            if isinstance(values, str):
                result.errors[number] = values
            else:
                found[str(number)] = values
        return found

    def _to_device(self, indices: Indices) -> torch.Tensor:
        return async_tensor_h2d(indices, device=self._device)


def _at(readout: Readout, local: set[Tap]) -> Readout | None:
    """A readout restricted to the taps of this process; None if it is not read here.

    Only a lens reads rows of several pipeline stages, each by itself.
    """
    if local.issuperset(readout.staged):
        return readout
    own = tuple(tap for tap in readout.taps if tap in local)
    return replace(readout, taps=own) if own and readout.kind == "lens" else None


def translated(
    job: Job, rows: torch.Tensor, translator: TranslatorModule
) -> torch.Tensor:
    """Apply to each of the rows `[R, hidden_size]` the linear map of its layer."""
    if "layers" not in job.kept:
        job.kept["layers"] = _rows_by_layer(job, rows.device)
    out = torch.empty_like(rows)
    for layer, index in job.kept["layers"].items():
        own = rows[index]
        mapped = own @ translator.weights[layer].T
        if layer in translator.biases:
            mapped = mapped + translator.biases[layer]
        out[index] = own + mapped if translator.residual else mapped
    return out


def _rows_by_layer(job: Job, device: torch.device) -> dict[int, torch.Tensor]:
    found: dict[int, list[int]] = {}
    for entry in job.entries:
        taps = entry.readout.taps
        for number in range(entry.num_rows):
            layer = taps[number % len(taps)][0]
            found.setdefault(layer, []).append(entry.first + number)
    return {layer: torch.tensor(rows).to(device) for layer, rows in found.items()}


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
