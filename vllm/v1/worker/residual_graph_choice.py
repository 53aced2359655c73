# SPDX-License-Identifier: Apache-2.0
"""The choice of the CUDA graph of each step, and when a better fitting one is recorded.

A step runs the smallest recorded family that has all ops it needs. Once enough steps
could have used a graph with fewer ops, that graph is recorded while serving.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import NOBODY, Launch
from vllm.v1.worker.residual_graphs import NOTHING, Ops

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        ModelCudaGraphManager,
    )

logger = init_logger(__name__)

RECORD_AFTER = 256
"""A graph is recorded after this many steps could have used it.

Recording takes about as long as 20 steps; a saved launch takes about 1/1000 of one.
"""
SUPERFLUOUS_LAUNCHES = 8192
"""A graph is recorded after this many superfluous launches, some 10 ms of GPU time."""
WORTH_RECORDING = 4
"""Minimum number of superfluous launches per step that a recorded graph must save."""
MOST_RECORDED = 64
"""Maximum number of graphs recorded while serving; each takes a few MiB of memory."""
MOST_REMEMBERED = 4096
"""Maximum number of combinations of needs and graphs that are counted."""


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
        superfluous = self.size - needed
        return superfluous >= WORTH_RECORDING and (
            self.wanted >= RECORD_AFTER
            or self.wanted * superfluous >= SUPERFLUOUS_LAUNCHES
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
