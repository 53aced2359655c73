# SPDX-License-Identifier: Apache-2.0
"""Families of CUDA graphs, which differ in which ops of taps launch.

An op without work still costs a kernel launch. Steps that neither capture nor steer
therefore run *plain* graphs, recorded while no op launches, which have the same kernels
as upstream's. Other steps run the smallest family that has all ops they need. A few
families are recorded when the engine starts. A better fitting one is recorded while
serving, once enough steps could have used it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import NOBODY, Launch
from vllm.model_executor.layers.residual.steer_op import EarlyAdditions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GraphCaptureContext
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        CreateForwardFn,
        ModelCudaGraphManager,
    )

logger = init_logger(__name__)

Descriptors = dict[CUDAGraphMode, list["BatchExecutionDescriptor"]]
Ops = frozenset[int]
"""Ops, identified by the addresses they read, as in `Launch`."""
NOTHING: Ops = frozenset()

RECORD_AFTER = 256
"""A graph is recorded after this many steps could have used it.

Recording takes about as long as 20 steps; a saved launch takes about 1/1000 of one.
"""
LAUNCHES_IN_VAIN = 8192
"""A graph is recorded after this many superfluous launches, some 10 ms of GPU time."""
WORTH_RECORDING = 4
"""Minimum number of superfluous launches per step that a recorded graph must save."""
MOST_RECORDED = 64
"""Maximum number of graphs recorded while serving; each takes a few MiB of memory."""
MOST_REMEMBERED = 4096
"""Maximum number of combinations of needs and graphs that are counted."""


COARSENESS = 0.75
"""Maximum ratio between the sizes of successive piecewise graphs that launch ops."""

Addresses = Mapping[tuple[int, str], int]
"""The address that identifies the op of a feature, by `(layer, hook)`."""


def families_at_start(
    capture: Addresses, steering: Addresses, programs: Addresses, may_record: bool
) -> list[Ops]:
    """The families that are recorded at the start, by ascending number of ops.

    Besides the empty and the full family these are: captures at `post_block`, which
    most requests ask for; additions alone; and additions with programs. Additions have
    a family without captures and programs, because with one of these launching in
    between a vector cannot be added together with the branch. A family costs about
    10 MiB and one second at the start. A family of all captures is therefore included
    only if no graph can be recorded later.

    Args:
        capture: addresses of the capture ops.
        steering: addresses of the ops that add vectors.
        programs: addresses of the ops that run programs.
        may_record: whether graphs can be recorded while serving.

    """
    behind = frozenset(a for (_, hook), a in capture.items() if hook == "post_block")
    captures, adds = frozenset(capture.values()), frozenset(steering.values())
    steers = adds | frozenset(programs.values())
    alone = (adds, steers) if may_record else (captures, adds, steers)
    every = (NOTHING, behind, *alone, captures | steers)
    return sorted(dict.fromkeys(every), key=len)


def with_families(descriptors: Descriptors, vllm_config: "VllmConfig") -> Descriptors:
    """The graphs to record at the start: all plain ones, and some in other families.

    Not all combinations, because a graph takes 1 to 2 MiB of device memory.

    Args:
        descriptors: the plain graphs, by mode.
        vllm_config: the engine's configuration.

    """
    last = len(Launch.families) - 1
    may_record = can_record(vllm_config)
    # Data-parallel and pipeline ranks must agree on the padding of a step, although
    # some may launch no op.
    parallel = vllm_config.parallel_config
    pads = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
    made: Descriptors = {}
    for mode, of_mode in descriptors.items():
        some = _coarse(of_mode) if pads else set(of_mode)
        made[mode] = []
        for one in of_mode:
            families = {0}
            if mode != CUDAGraphMode.FULL:
                families |= {last} if one in some else set()
            elif may_record and not _is_usual(one):
                families.add(last)
            else:
                families.update(range(last + 1))
            made[mode] += [replace(one, tapped=family) for family in sorted(families)]
    return made


def _is_usual(descriptor: "BatchExecutionDescriptor") -> bool:
    """Whether the graph is recorded at the start in all families: powers of two.

    For other sizes, steps run the full family until a graph is recorded for them.
    """
    size = descriptor.num_reqs or descriptor.num_tokens
    return size.bit_count() == 1


def _coarse(
    descriptors: Sequence["BatchExecutionDescriptor"],
) -> set["BatchExecutionDescriptor"]:
    """The subset of piecewise graphs recorded with ops; other steps are padded to them.

    Padding adds a third at most. Piecewise graphs are many small graphs, which take
    more memory than a full graph.
    """
    kept: set[BatchExecutionDescriptor] = set()
    smallest: dict[BatchExecutionDescriptor, int] = {}
    for one in sorted(descriptors, key=lambda d: d.num_tokens, reverse=True):
        kind = replace(one, num_tokens=0)
        if one.num_tokens <= COARSENESS * smallest.get(kind, math.inf):
            smallest[kind] = one.num_tokens
            kept.add(one)
    return kept


def dispatched_families(
    plain: Sequence[tuple[CUDAGraphMode, list[BatchDescriptor]]],
) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
    """The graphs that the V1 runner records: all plain ones, and those of families.

    Its graphs are recorded at the start only, so whole passes have all families, for
    every size. Steps with prompts are not padded further for a graph with ops, as V1
    has padded them already when their ops become known.
    """
    last = len(Launch.families) - 1
    return [
        (
            mode,
            [
                replace(one, tapped=family)
                for one in of_mode
                for family in range(last + 1)
                if mode == CUDAGraphMode.FULL or family in (0, last)
            ],
        )
        for mode, of_mode in plain
    ]


class Recorded:
    """The family of the graph that is being recorded, 0 otherwise.

    Engine thread only.
    """

    family: ClassVar[int] = 0


def record_family(family: int, mode: CUDAGraphMode) -> None:
    """Set the ops that launch in the passes that are recorded or warmed up next.

    Args:
        family: their index in `Launch.families`.
        mode: of the graph that is recorded.

    """
    Recorded.family = family
    Launch.taps = Launch.families[family]
    Launch.whole = mode == CUDAGraphMode.FULL
    EarlyAdditions.begun.clear()


def as_recorded(descriptor: BatchDescriptor) -> BatchDescriptor:
    """The key of a dummy pass's graph in the V1 runner, which knows plain graphs."""
    return replace(descriptor, tapped=Recorded.family)


def without_graph(
    descriptor: "BatchExecutionDescriptor", num_tokens: int
) -> "BatchExecutionDescriptor":
    """The same step without a graph: a graph does not call functions of Python's.

    Args:
        descriptor: the step's plain graph.
        num_tokens: of the step, without a graph's padding.

    """
    if descriptor.cg_mode == CUDAGraphMode.NONE:
        return descriptor
    return replace(
        descriptor,
        cg_mode=CUDAGraphMode.NONE,
        num_tokens=num_tokens,
        num_reqs=None,
        uniform_token_count=None,
        max_query_len=None,
        tapped=0,
    )


def end_recording() -> None:
    """Reset the state after recording: no op launches until a step is planned."""
    Recorded.family = 0
    Launch.taps, Launch.whole = Launch.families[0], False
    EarlyAdditions.begun.clear()


class GraphRecorder:
    """Records further graphs of a graph manager after its start."""

    def __init__(
        self, manager: "ModelCudaGraphManager", create_forward: "CreateForwardFn"
    ) -> None:
        self._manager = manager
        self._create_forward = create_forward
        self._context: GraphCaptureContext | None = None
        """Shared by all recordings, so that they use one stream.

        PyTorch allocates a cuBLAS workspace (32 MiB on an H200) per stream on which
        matrix products are recorded, and the graphs keep it.
        """

    def __call__(self, descriptor: "BatchExecutionDescriptor") -> None:
        """Record a full graph, between two steps.

        No kernel runs. As at the start, the pass is recorded with dummy inputs, which
        the following step overwrites.
        """
        from vllm.compilation.cudagraph_pool import capture_pool
        from vllm.distributed.parallel_state import GraphCaptureContext, get_tp_group
        from vllm.model_executor.offloader.base import get_offloader

        manager, graph = self._manager, torch.cuda.CUDAGraph()
        if self._context is None:
            self._context = GraphCaptureContext(torch.cuda.Stream(manager.device))
        before = Launch.taps
        # Upstream's `graph_capture` does this for all groups of ranks and creates a new
        # stream each time; here this process is the only rank.
        recording = get_tp_group().graph_capture(self._context)
        try:
            with torch.inference_mode(), recording:
                forward = self._create_forward(descriptor, warmup=False)
                get_offloader().sync_prev_onload()
                with (
                    capture_pool(manager.pool, manager.vllm_config) as pool,
                    torch.cuda.graph(
                        graph,
                        pool,  # type: ignore[arg-type]
                        stream=manager._capture_stream(descriptor),
                        # Other threads wait for events of earlier steps meanwhile.
                        capture_error_mode="thread_local",
                    ),
                ):
                    forward(CUDAGraphMode.NONE)
                    get_offloader().join_after_forward()
        finally:
            end_recording()
            Launch.taps = before
        manager.graphs[descriptor] = graph


def can_record(vllm_config: "VllmConfig") -> bool:
    """Whether graphs can be recorded between two steps.

    Only by the V2 runner. Only if a single process runs the model, because recording
    with several ranks while serving is untested. Not with LoRA adapters, because
    recording would overwrite their state of the current step.
    """
    parallel = vllm_config.parallel_config
    return (
        vllm_config.use_v2_model_runner
        and parallel.world_size == 1
        and parallel.data_parallel_size == 1
        and vllm_config.lora_config is None
    )


@dataclass(slots=True)
class Choice:
    """The graph used for a set of needed ops, and how often it was used."""

    descriptor: "BatchExecutionDescriptor"
    size: int
    """Number of ops that it launches."""
    wanted: int = 0
    """Number of steps."""

    def is_worth_recording(self, needed: int) -> bool:
        """Whether a graph with only the `needed` ops should be recorded."""
        in_vain = self.size - needed
        return in_vain >= WORTH_RECORDING and (
            self.wanted >= RECORD_AFTER or self.wanted * in_vain >= LAUNCHES_IN_VAIN
        )


class GraphFamilies:
    """The ops that launch in the current step, and the choice of its graph.

    All tensor-parallel ranks decide alike, because decisions only depend on the
    scheduler's outputs.
    """

    def __init__(self, families: Sequence[Ops], *, may_record: bool) -> None:
        """Start with the families that are recorded at the start.

        Args:
            families: their ops; the first is empty, the last has all ops.
            may_record: whether graphs may be recorded while serving.

        """
        self._started = len(families)
        self._may_record = may_record
        self._needed: Ops = NOTHING
        self._parts = NOTHING, NOTHING
        self._both: Ops = NOTHING
        """The union of `_parts`, cached because most steps need the same ops."""
        self._chosen: dict[tuple[Ops, BatchExecutionDescriptor], Choice] = {}
        self._padded: dict[BatchExecutionDescriptor, BatchExecutionDescriptor] = {}
        self._dispatched: dict[Ops, int] = {}
        """The families that the V1 runner's full graphs had, by needed ops."""
        # Until the first step or recording every op is called and checks its arguments,
        # in compiled code as well, so that errors are raised at the start.
        Launch.begin(NOBODY, tuple(families))

    def plan(self, steers: Ops, captures: Ops) -> None:
        """Set the ops that the next forward pass needs for steering and capture."""
        if not (steers and captures):
            self._needed = steers or captures
        else:
            if self._parts != (steers, captures):
                self._parts, self._both = (steers, captures), steers | captures
            self._needed = self._both
        Launch.taps = self._needed

    def end(self) -> None:
        """Called after the pass is queued, so that dummy runs launch no op."""
        self._needed = Launch.taps = NOTHING

    def choose(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The graph for the step, in place of the plain one `descriptor`."""
        if not self._needed or descriptor.cg_mode == CUDAGraphMode.NONE:
            return descriptor
        if descriptor.cg_mode != CUDAGraphMode.FULL:
            return self._padded_to(descriptor, manager)
        known = self._chosen.get((self._needed, descriptor))
        if known is None:
            if len(self._chosen) > MOST_REMEMBERED:
                self._chosen.clear()
            known = Choice(*self._smallest(descriptor, manager))
            self._chosen[self._needed, descriptor] = known
        known.wanted += 1
        if (
            self._may_record
            and manager is not None
            and known.is_worth_recording(len(self._needed))
        ):
            return self._record(descriptor, manager) or known.descriptor
        return known.descriptor

    def dispatch(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> BatchDescriptor:
        """The key of the step's graph in the V1 runner, in place of the plain one's."""
        if not self._needed or mode == CUDAGraphMode.NONE:
            return descriptor
        if mode == CUDAGraphMode.PIECEWISE:
            return replace(descriptor, tapped=self._started - 1)
        family = self._dispatched.get(self._needed)
        if family is None:
            if len(self._dispatched) > MOST_REMEMBERED:
                self._dispatched.clear()
            fits = (self._needed <= ops for ops in Launch.families)
            family = next(index for index, fit in enumerate(fits) if fit)
            self._dispatched[self._needed] = family
        return replace(descriptor, tapped=family)

    def _padded_to(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The smallest piecewise graph of at least this size that has all ops."""
        padded = self._padded.get(descriptor)
        if padded is None:
            assert manager is not None, "a graph is chosen without a graph manager"
            known = manager._capture_descs[descriptor.cg_mode]
            wanted = replace(descriptor, tapped=self._started - 1)
            larger = [
                one
                for one in known
                if one.num_tokens >= wanted.num_tokens
                and replace(one, num_tokens=wanted.num_tokens) == wanted
            ]
            padded = min(larger, key=lambda one: one.num_tokens, default=wanted)
            self._padded[descriptor] = padded
        return padded

    def _smallest(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> tuple["BatchExecutionDescriptor", int]:
        """The recorded graph with the fewest ops that include all needed ones.

        Returns:
            The graph, and its number of ops.

        """
        graphs = () if manager is None else manager.graphs
        fitting = (
            (len(ops), family, replace(descriptor, tapped=family))
            for family, ops in enumerate(Launch.families)
            if self._needed <= ops
        )
        size, _, chosen = min(one for one in fitting if one[2] in graphs)
        return chosen, size

    def _record(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager",
    ) -> "BatchExecutionDescriptor | None":
        """Record a graph with only the needed ops; None if that fails."""
        record: Callable[[BatchExecutionDescriptor], None] | None
        record = getattr(manager, "residual_recorder", None)
        if record is None:
            return None
        if self._needed not in Launch.families:
            Launch.families = (*Launch.families, self._needed)
        exact = replace(descriptor, tapped=Launch.families.index(self._needed))
        try:
            record(exact)
        except Exception:
            logger.exception(
                "No graph could be recorded while serving; steps continue with those "
                "that were recorded at the start, which are slower but equivalent"
            )
            self._may_record = False
            return None
        self._chosen.clear()  # The new graph may fit other needs as well.
        num_recorded = sum(one.tapped >= self._started for one in manager.graphs)
        logger.info(
            "Recorded a CUDA graph for %d tokens with %d ops of taps (%d of %d)",
            descriptor.num_tokens,
            len(self._needed),
            num_recorded,
            MOST_RECORDED,
        )
        self._may_record = num_recorded < MOST_RECORDED
        return exact
