# SPDX-License-Identifier: Apache-2.0
"""Families of CUDA graphs, which differ in which ops of taps launch.

An op without work still costs a kernel launch. Steps that neither capture nor steer
therefore run *plain* graphs, recorded while no op launches, which have the same kernels
as upstream's. Other steps run a family that has all ops they need, which
`residual_graph_choice.py` chooses. Few graphs of families are recorded when the engine
starts, others while serving, between two steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import Launch
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
    between a vector cannot be added together with the branch. A family of all captures
    is included only if no graph can be recorded later.

    Args:
        capture: addresses of the capture ops.
        steering: addresses of the ops that add vectors.
        programs: addresses of the ops that run programs.
        may_record: whether graphs can be recorded while serving.

    """
    post_block = frozenset(
        a for (_, hook), a in capture.items() if hook == "post_block"
    )
    captures, adds = frozenset(capture.values()), frozenset(steering.values())
    steers = adds | frozenset(programs.values())
    alone = (adds, steers) if may_record else (captures, adds, steers)
    every = (NOTHING, post_block, *alone, captures | steers)
    return sorted(dict.fromkeys(every), key=len)


def with_families(descriptors: Descriptors, vllm_config: "VllmConfig") -> Descriptors:
    """The graphs to record at the start: all plain ones, and some in other families.

    Not all combinations, because a graph takes 1 to 2 MiB of device memory and a tenth
    of a second. If more can be recorded later, batches of one have all families, so
    that all kernels are compiled at the start; sizes that are other powers of two have
    the full family, and the rest is recorded when it is needed.

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
            else:
                size = one.num_reqs or one.num_tokens
                if size == 1 or not may_record:
                    families.update(range(last + 1))
                elif size.bit_count() == 1:
                    families.add(last)
            made[mode] += [replace(one, tapped=family) for family in sorted(families)]
    return made


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


def begin_recording(
    manager: "ModelCudaGraphManager", create_forward: "CreateForwardFn"
) -> "GraphRecorder":
    """Called before a manager records its graphs; what records further ones later.

    Upstream records with a first manager only to estimate the memory of graphs, which
    it does for all piecewise ones. Those of families, few MiB each, are left out.
    """
    pieces = manager._capture_descs.get(CUDAGraphMode.PIECEWISE)
    if pieces and manager._max_full_descs_to_capture is not None:
        pieces[:] = [one for one in pieces if not one.tapped]
    return GraphRecorder(manager, create_forward)


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
        # Upstream's `graph_capture` creates a new stream each time, and prepares groups
        # of other pipeline stages, with which no graph communicates.
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

    Only by the V2 runner. Ranks that compute a layer together record at the same step,
    because all of them decide from the scheduler's output. Engines that run in data
    parallel do not, though layers of experts may join them. Not with LoRA adapters,
    because recording would overwrite their state of the current step.
    """
    return (
        vllm_config.use_v2_model_runner
        and vllm_config.parallel_config.data_parallel_size == 1
        and vllm_config.lora_config is None
    )
