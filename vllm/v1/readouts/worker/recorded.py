# SPDX-License-Identifier: Apache-2.0
"""Replays the operations of decode steps as CUDA graphs.

Between two forward passes the engine's thread would call torch some thirty times for a
lens and ten times for a probe. The operations of consecutive steps differ only in the
rows that they read, so they are recorded once and then replayed by a single call.

Gain, with the probe's kernel (8B class, `benchmarks/NOTES.md`): a step with a probe for
every request took 0.999 of one without instead of 1.041, with an SAE 1.028 instead of
1.062, with a lens of 8 requests 1.043 instead of 1.078, on different GPUs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch

from vllm.logger import init_logger
from vllm.v1.readouts.modules import ProbeModule
from vllm.v1.readouts.worker.jobs import Job, JobKey, JobSet
from vllm.v1.readouts.worker.kinds import Arrays
from vllm.v1.readouts.worker.operations import Operations
from vllm.v1.readouts.worker.pending import MOST_WAITING_BYTES, JobResult
from vllm.v1.readouts.worker.probe_kernel import suits
from vllm.v1.residual.sae import SparseAutoencoder

logger = init_logger(__name__)
T = TypeVar("T")

RECORD_AFTER = 8
"""Consecutive steps of a job set after which its operations are recorded."""
MOST_RECORDINGS = 16
MOST_BYTES = 64 << 20
"""Largest float32 values, of features or logits, of operations that are recorded.

Recordings keep their memory; and for more values, the calls are a small part of the
time.
"""


class Streams:
    """The stream of the forward pass, and the side stream of a worker's readouts.

    Each has a graph memory pool and a stream for recording of its own: the workspaces
    of matrix products belong to the stream that they are recorded on.
    """

    def __init__(self, beside: torch.cuda.Stream) -> None:
        self._beside = beside
        self._recording = torch.cuda.Stream(beside.device)
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(2)]
        self._graphs: list[WeakSet[torch.cuda.CUDAGraph]] = [WeakSet(), WeakSet()]
        self._ready = torch.cuda.Event()

    def event(self) -> torch.cuda.Event:
        """An event that the host can wait for."""
        return torch.cuda.Event(blocking=True)

    def record(self, work: Callable[[], T], beside: bool) -> tuple["Replay", T]:
        """Record a graph for the side stream, or else for the forward pass's stream."""
        stream = self._beside if beside else self._recording
        graph = torch.cuda.CUDAGraph()
        if not self._graphs[beside]:  # A pool ends with the last graph that has it.
            self._pools[beside] = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # Libraries allocate workspaces, which the pool must not own.
            # Other threads wait for events of earlier steps meanwhile.
            graph.capture_begin(self._pools[beside], capture_error_mode="thread_local")
            try:
                found = work()
            finally:
                graph.capture_end()
        self._graphs[beside].add(graph)
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay, found

    def run(self, work: Callable[[], None], done: torch.cuda.Event) -> None:
        """Queue work after the forward pass."""
        work()
        done.record()

    def run_beside(self, work: Callable[[], None], done: torch.cuda.Event) -> None:
        """Queue work on the side stream, after what was queued for the forward pass."""
        self._ready.record()
        self._beside.wait_event(self._ready)
        with torch.cuda.stream(self._beside):
            work()
        done.record(self._beside)

    def wait(self, done: torch.cuda.Event) -> None:
        """Let the stream of the forward pass wait for an event."""
        torch.cuda.current_stream().wait_event(done)


Replay: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Copies:
    """Pinned host memory for the results of one step."""

    arrays: list[Arrays]
    """By job."""
    work: Callable[[], None]
    """Queues the operations, with their results in the arrays."""
    done: Any
    """The event after which they are valid."""


@dataclass(slots=True)
class Recording:
    """The recorded operations of steps with the same jobs."""

    new_copies: Callable[[], Copies]
    index: list[torch.Tensor]
    """By job: `[R]` int64, rows relative to the first staging row."""
    job_set: JobSet
    """The one whose rows are in `index`; kept, so that no other has its `id`."""
    rows: list[torch.Tensor] | None = None
    """By job: `[R, hidden_size]`, from which the side stream computes the results; None
    if the stream of the forward pass does, from staging memory."""
    free: list[Copies] = field(default_factory=list)
    last: Any = None
    """The event of the last step on the side stream."""

    def load(self, job_set: JobSet) -> None:
        """Read the rows of another job set with the same jobs."""
        for own, job in zip(self.index, job_set.jobs, strict=True):
            own.copy_(job.index, non_blocking=True)
        self.job_set = job_set


class RecordedSteps:
    """Records job sets that stay the same for many steps, and replays them.

    Engine thread only.
    """

    def __init__(
        self, operations: Operations, vocab_size: int, streams: Streams
    ) -> None:
        """Start without recordings.

        Args:
            operations: of this worker.
            vocab_size: of the model; 0 if lenses cannot be recorded.
            streams: those of this worker.

        """
        self._operations = operations
        self._vocab_size = vocab_size
        self._streams = streams
        self._recordings: dict[JobKey, Recording] = {}
        self._current: tuple[JobSet, int] | None = None
        self._key: JobKey | None = None
        """Of the current job set; None if it cannot be recorded."""
        self._steps = 0
        self.failed = False

    def forget(self) -> None:
        """Drop all recordings, as modules that they use may be unloaded."""
        for key in list(self._recordings):
            self._drop(key)
        self._current = None

    def step(
        self, job_set: JobSet, staging: torch.Tensor, first_row: int
    ) -> tuple[Copies, Callable[[], None]] | None:
        """Queue a step's operations, and copies of their results to the host.

        Args:
            job_set: the step's job set.
            staging: `[S, hidden_size]`, the staging memory.
            first_row: the step's first row in `staging`.

        Returns:
            The results, and a function to call when they are no longer needed. None if
            the step is not recorded and nothing was queued.

        """
        rows = staging[first_row:]
        recording = self._recording(job_set, rows, first_row)
        if recording is None:
            return None
        if recording.job_set is not job_set:
            recording.load(job_set)
        free = recording.free
        copies = free.pop() if free else self._tried(recording.new_copies)
        if copies is None:
            return None
        if recording.rows is not None:
            if recording.last is not None:
                self._streams.wait(recording.last)  # It reads the rows of that step.
            _gather(rows, recording.index, recording.rows)
            self._streams.run_beside(copies.work, copies.done)
            recording.last = copies.done
        else:
            self._streams.run(copies.work, copies.done)
        return copies, lambda: free.append(copies)

    def _recording(
        self, job_set: JobSet, rows: torch.Tensor, first_row: int
    ) -> Recording | None:
        current = self._current
        if current is None or current[0] is not job_set or current[1] != first_row:
            self._current, self._steps = (job_set, first_row), 0
            self._key = self._key_of(job_set, first_row)
        self._steps += 1
        if self._key is None or self.failed:
            return None
        found = self._recordings.get(self._key)
        if found is None and self._steps > RECORD_AFTER:
            found = self._try_to_record(job_set, rows)
        return found

    def _key_of(self, job_set: JobSet, first_row: int) -> JobKey | None:
        if job_set.table is None or not all(map(self._is_recordable, job_set.jobs)):
            return None
        # Others with the same jobs have other probes or layers.
        own = id(job_set) if any(map(_depends_on_requests, job_set.jobs)) else None
        return first_row, own, *((job.key, len(job.index)) for job in job_set.jobs)

    def _is_recordable(self, job: Job) -> bool:
        """Whether a job's operation makes the same calls in each step, and is small."""
        match job.key:
            case ("probe" | "probes" | "norm", *_):
                values = 0
            case ("lens", int(), (), _) if self._vocab_size:
                values = self._vocab_size
            case ("sae", SparseAutoencoder() as sae, int(), ()):
                values = sae.d_sae
            case _:
                return False
        return 4 * values * len(job.index) <= MOST_BYTES

    def _try_to_record(self, job_set: JobSet, rows: torch.Tensor) -> Recording | None:
        began = perf_counter()
        recording = self._tried(lambda: self._record(job_set, rows))
        if recording is None:
            return None
        if len(self._recordings) == MOST_RECORDINGS:
            self._drop(next(iter(self._recordings)))
        assert self._key is not None, "only job sets with a key are recorded"
        self._recordings[self._key] = recording
        logger.debug(
            "Recorded the readouts of %d rows in %.1f ms",
            sum(map(len, recording.index)),
            1e3 * (perf_counter() - began),
        )
        return recording

    def _tried(self, record: Callable[[], T]) -> T | None:
        """What `record` returns; None if it fails, after which nothing is replayed."""
        try:
            return record()
        except RuntimeError:
            self.failed = True
            logger.exception(
                "Readouts could not be recorded as CUDA graphs. Their results are "
                "the same without, but a step takes the CPU longer."
            )
            return None

    def _drop(self, key: JobKey) -> None:
        recording = self._recordings.pop(key)
        if recording.last is not None:
            self._streams.wait(recording.last)  # Its rows become free for this stream.

    def _record(self, job_set: JobSet, staging: torch.Tensor) -> Recording:
        record = self._record_light if _is_light(job_set) else self._record_beside
        made = record(job_set, staging)
        made.free.append(made.new_copies())
        return made

    def _record_light(self, job_set: JobSet, staging: torch.Tensor) -> Recording:
        """Probes that are computed from staging memory into memory of the host."""
        jobs, compute = job_set.jobs, self._operations.probe_into
        index = [job.index.clone() for job in jobs]

        def new_copies() -> Copies:
            values = [
                _pinned((len(job.index), _vectors(job)), torch.float32, staging)
                for job in jobs
            ]

            def work() -> None:
                for job, own, found in zip(jobs, index, values, strict=True):
                    compute(job, staging, own, found)

            # Of its own: a graph has the addresses that it writes to.
            replay, _ = self._streams.record(work, False)
            arrays = [{"values": found} for found in values]
            return Copies(arrays, replay, self._streams.event())

        return Recording(new_copies, index, job_set)

    def _record_beside(self, job_set: JobSet, staging: torch.Tensor) -> Recording:
        """Operations on copied rows, while the next forward pass runs."""
        jobs, compute = job_set.jobs, self._operations.compute
        index = [job.index.clone() for job in jobs]
        rows = [staging.new_empty(len(one), staging.shape[1]) for one in index]
        _gather(staging, index, rows)

        def compute_all() -> list[Arrays]:
            return [
                compute(job, own, JobResult(job.entries, 0, {}))
                for job, own in zip(jobs, rows, strict=True)
            ]

        replay, results = self._streams.record(compute_all, True)

        def new_copies() -> Copies:
            arrays = [
                {name: _pinned(one.shape, one.dtype, one) for name, one in each.items()}
                for each in results
            ]

            def work() -> None:
                replay()
                for found, host in zip(results, arrays, strict=True):
                    for name, array in found.items():
                        host[name].copy_(array, non_blocking=True)

            return Copies(arrays, work, self._streams.event())

        return Recording(new_copies, index, job_set, rows)


def _gather(
    staging: torch.Tensor, index: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
) -> None:
    """Copy the rows of a step from staging memory."""
    for at, own in zip(index, rows, strict=True):
        torch.index_select(staging, 0, at, out=own)


def _pinned(
    shape: tuple[int, ...], dtype: torch.dtype, source: torch.Tensor
) -> torch.Tensor:
    """Host memory; pinned if `source` is on a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=source.is_cuda)


def _depends_on_requests(job: Job) -> bool:
    """Whether its operation keeps tensors that depend on the job set's requests."""
    match job.key:
        case ("probes" | "norm", *_):
            return True
        case ("lens", _, _, translator):
            return translator is not None
    return False


def _is_light(job_set: JobSet) -> bool:
    """Whether the stream of the forward pass computes the results, by a kernel per job.

    Probes take the GPU less time than the CPU needs to order two streams. Their results
    must be few enough to be copied and released in each step.
    """
    sizes = [4 * _vectors(job) * len(job.index) for job in job_set.jobs]
    return min(sizes) > 0 and sum(sizes) <= MOST_WAITING_BYTES


def _vectors(job: Job) -> int:
    """Values per row of a probe that the kernel can compute; 0 for other operations."""
    match job.key:
        case ("probe", ProbeModule(activation=activation, cosine=cosine) as module):
            values = len(module.bias)
        case ("probes", int() as values, activation, cosine, *_):
            pass
        case _:
            return 0
    return values if suits(activation, cosine, len(job.index)) else 0
