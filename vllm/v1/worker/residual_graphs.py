# SPDX-License-Identifier: Apache-2.0
"""Families of CUDA graphs that differ in which ops of taps launch.

An op that has nothing to do still costs a launch. Steps that neither capture nor steer
therefore run *plain* graphs, recorded while nothing launches, so that they hold the
same kernels as upstream's. Other steps run the smallest family that has what they
need. A few families are recorded when the engine starts; one that fits better is
recorded while it serves, once enough steps would have run it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm.config.compilation import CUDAGraphMode
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
"""Ops by the addresses they read, as in `Launch`."""
NOTHING: Ops = frozenset()

RECORD_AFTER = 256
"""Steps that must have wanted a graph, at most. Recording one takes as long as some
twenty steps, and a launch that is saved is worth a thousandth of one."""
LAUNCHES_IN_VAIN = 8192
"""The same, in what these steps have launched too much: some 10 ms of the GPU."""
WORTH_RECORDING = 4
"""Launches in vain, at least, that the recorded graph saves."""
MOST_RECORDED = 64
"""Graphs recorded while serving: each takes some MiB of device memory."""
MOST_REMEMBERED = 4096
"""Wishes for graphs that are counted at a time."""


COARSENESS = 0.75
"""Piecewise graphs that launch have sizes that differ by this factor, at least."""

Addresses = Mapping[tuple[int, str], int]
"""What the op of a feature is known by, by layer and hook."""


def families_at_start(
    capture: Addresses, steering: Addresses, programs: Addresses, may_record: bool
) -> list[Ops]:
    """What the graphs launch that are recorded at the start, ascending.

    Besides nothing and everything: the capture of what most requests ask for, the
    stream behind the blocks; and additions alone, then with programs, as nothing can be
    added beside the branch where a capture or a program launches in between. A family
    takes some ten MiB and a second of the start, so that all captures alone are among
    them only where no graph can be recorded later.
    """
    behind = frozenset(a for (_, hook), a in capture.items() if hook == "post_block")
    captures, adds = frozenset(capture.values()), frozenset(steering.values())
    steers = adds | frozenset(programs.values())
    alone = (adds, steers) if may_record else (captures, adds, steers)
    every = (NOTHING, behind, *alone, captures | steers)
    return sorted(dict.fromkeys(every), key=len)


def with_families(descriptors: Descriptors, vllm_config: "VllmConfig") -> Descriptors:
    """The graphs to record at the start: each one plain, and in other families.

    Not all of them: a graph takes a MiB or two of the device's memory.

    Args:
        descriptors: of the plain graphs, by mode.
        vllm_config: the engine's configuration.

    """
    last = len(Launch.families) - 1
    may_record = can_record(vllm_config)
    # Ranks with requests or layers of their own, of which others may launch nothing,
    # must agree on how far a step is padded.
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
    """Whether all families have the graph from the start: others are recorded later.

    Until then steps run the one that launches everything.
    """
    size = descriptor.num_reqs or descriptor.num_tokens
    return size.bit_count() == 1


def _coarse(
    descriptors: Sequence["BatchExecutionDescriptor"],
) -> set["BatchExecutionDescriptor"]:
    """Those to which other steps with prompts are padded, by a third at most.

    Their graphs are many small ones, and take more memory than those of whole steps.
    """
    kept: set[BatchExecutionDescriptor] = set()
    smallest: dict[BatchExecutionDescriptor, int] = {}
    for one in sorted(descriptors, key=lambda d: d.num_tokens, reverse=True):
        kind = replace(one, num_tokens=0)
        if one.num_tokens <= COARSENESS * smallest.get(kind, math.inf):
            smallest[kind] = one.num_tokens
            kept.add(one)
    return kept


def record_family(descriptor: "BatchExecutionDescriptor") -> None:
    """Say what the pass launches that is recorded next, or warms that up."""
    Launch.taps = Launch.families[descriptor.tapped]
    Launch.whole = descriptor.cg_mode == CUDAGraphMode.FULL
    EarlyAdditions.begun.clear()


def end_recording() -> None:
    """What follows is no recording, and launches nothing until a step is planned."""
    Launch.taps, Launch.whole = Launch.families[0], False
    EarlyAdditions.begun.clear()


class GraphRecorder:
    """Records one more graph of a manager whose start is over."""

    def __init__(
        self, manager: "ModelCudaGraphManager", create_forward: "CreateForwardFn"
    ) -> None:
        self._manager = manager
        self._create_forward = create_forward
        self._context: GraphCaptureContext | None = None
        """Of all recordings: PyTorch lends cuBLAS working memory for each stream that
        products are recorded on, 32 MiB of an H200's, and recordings keep it."""

    def __call__(self, descriptor: "BatchExecutionDescriptor") -> None:
        """Record a full graph, between two steps.

        No kernel runs: the pass is prepared over dummy inputs, as at the start, and
        the step that follows writes its own inputs over them.
        """
        from vllm.compilation.cudagraph_pool import capture_pool
        from vllm.distributed.parallel_state import GraphCaptureContext, get_tp_group
        from vllm.model_executor.offloader.base import get_offloader

        manager, graph = self._manager, torch.cuda.CUDAGraph()
        if self._context is None:
            self._context = GraphCaptureContext(torch.cuda.Stream(manager.device))
        before = Launch.taps
        # Upstream's `graph_capture` is this for all groups of ranks, on a stream of its
        # own each time; this process is the only one.
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

    Only where one process serves the model: what recording registers with other ranks
    was not tried beside running steps. Not with adapters, whose state of the step
    under way a recording would overwrite.
    """
    parallel = vllm_config.parallel_config
    return (
        parallel.world_size == 1
        and parallel.data_parallel_size == 1
        and vllm_config.lora_config is None
    )


@dataclass(slots=True)
class Choice:
    """The graph that serves a need, and how often it was wanted."""

    descriptor: "BatchExecutionDescriptor"
    size: int
    """How many ops it launches."""
    wanted: int = 0

    def is_worth_recording(self, needed: int) -> bool:
        """Whether steps that need `needed` ops have paid enough for a larger graph."""
        in_vain = self.size - needed
        return in_vain >= WORTH_RECORDING and (
            self.wanted >= RECORD_AFTER or self.wanted * in_vain >= LAUNCHES_IN_VAIN
        )


class GraphFamilies:
    """Which ops launch in the step under way, and which graphs have them.

    Every tensor-parallel rank decides alike: all it looks at is what the scheduler
    decided, step by step.
    """

    def __init__(
        self, families: Sequence[Ops], *, one_family: bool, may_record: bool
    ) -> None:
        """Begin with the families that are recorded at the start.

        Args:
            families: what they launch; the first nothing, the last everything.
            one_family: the runner records one set of graphs, so that everything
                always launches; where there is nothing to do it does nothing.
            may_record: graphs may be recorded while serving.

        """
        self._started = len(families)
        self._may_record = may_record
        self._idle = families[-1] if one_family else NOTHING
        self._needed: Ops = NOTHING
        self._parts = NOTHING, NOTHING
        self._both: Ops = NOTHING
        """Their union: most steps need what the step before needed."""
        self._chosen: dict[tuple[Ops, BatchExecutionDescriptor], Choice] = {}
        self._padded: dict[BatchExecutionDescriptor, BatchExecutionDescriptor] = {}
        # Until the first step or recording each op is called and looks at what it is
        # given, in compiled code too: an error shows at the start.
        Launch.begin(self._idle or NOBODY, tuple(families))

    def plan(self, steers: Ops, captures: Ops) -> None:
        """Take note of what the next pass does."""
        if not (steers and captures):
            self._needed = steers or captures
        else:
            if self._parts != (steers, captures):
                self._parts, self._both = (steers, captures), steers | captures
            self._needed = self._both
        Launch.taps = (self._idle | self._needed) if self._idle else self._needed

    def end(self) -> None:
        """The pass is queued: what follows, a dummy run for example, does nothing."""
        self._needed = NOTHING
        Launch.taps = self._idle

    def choose(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The graph that the step runs in place of `descriptor`, which is plain."""
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

    def _padded_to(
        self,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager | None",
    ) -> "BatchExecutionDescriptor":
        """The piecewise graphs that launch everything and are next in size."""
        padded = self._padded.get(descriptor)
        if padded is None:
            assert manager is not None, "a graph is chosen where there is none"
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
        """The graph that launches least beyond the need, and how much it launches."""
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
        """A graph of just what the step needs; None if that cannot be had."""
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
                "No graph could be recorded while serving; steps go on with those "
                "that were recorded at the start, which do the same more slowly"
            )
            self._may_record = False
            return None
        self._chosen.clear()  # The new graph may serve others too.
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
