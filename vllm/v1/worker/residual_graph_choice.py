# SPDX-License-Identifier: Apache-2.0
"""The choice of the CUDA graph of each step, and when a better fitting one is recorded.

A step runs the smallest recorded family that has all ops it needs. Once enough steps
could have used a graph with fewer ops, that graph is recorded while serving. If none is
recorded for the step's size, that with all ops is recorded before the step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers.residual.capture_op import NOBODY, Launch
from vllm.v1.worker.residual_graphs import NOTHING, Ops, without_graph

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
    family: Ops
    """The smallest family of the start that has the needed ops."""
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
        self._started = tuple(families)
        self._may_record = may_record
        self._num_recorded = 0
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
        assert manager is not None, "a graph is chosen without a graph manager"
        known = self._known(self._needed, descriptor, manager)
        if known is None:
            recorded = self._record(self._started[-1], descriptor, manager)
            return recorded or without_graph(descriptor, descriptor.num_tokens)
        if (
            known.size - len(self._needed) < WORTH_RECORDING
            or not self._may_record
            or self._num_recorded >= MOST_RECORDED
        ):
            return known.descriptor
        # Requests with few ops each often need another set of them in each step, which
        # therefore count together for a family that has them all.
        for ops in dict.fromkeys((self._needed, known.family)):
            wish = self._known(ops, descriptor, manager)
            assert wish is not None, "the needed ops have a graph"
            wish.wanted += known.size > len(ops)
            if wish.is_worth_recording(len(ops)):
                self._num_recorded += 1
                return self._record(ops, descriptor, manager) or known.descriptor
        return known.descriptor

    def dispatch(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> BatchDescriptor:
        """The key of the step's graph in the V1 runner, in place of the plain one's."""
        if not self._needed or mode == CUDAGraphMode.NONE:
            return descriptor
        if mode == CUDAGraphMode.PIECEWISE:
            return replace(descriptor, tapped=len(self._started) - 1)
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
            wanted = replace(descriptor, tapped=len(self._started) - 1)
            larger = [
                one
                for one in known
                if one.num_tokens >= wanted.num_tokens
                and replace(one, num_tokens=wanted.num_tokens) == wanted
            ]
            padded = min(larger, key=lambda one: one.num_tokens, default=wanted)
            self._padded[descriptor] = padded
        return padded

    def _known(
        self,
        needed: Ops,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager",
    ) -> Choice | None:
        """The recorded graph with the fewest ops that include all needed ones."""
        known = self._chosen.get((needed, descriptor))
        if known is None:
            fitting = (
                (len(ops), family, replace(descriptor, tapped=family))
                for family, ops in enumerate(Launch.families)
                if needed <= ops
            )
            recorded = [one for one in fitting if one[2] in manager.graphs]
            if not recorded:
                return None
            if len(self._chosen) > MOST_REMEMBERED:
                self._chosen.clear()
            size, _, chosen = min(recorded)
            family = next(ops for ops in self._started if needed <= ops)
            known = Choice(chosen, size, family)
            self._chosen[needed, descriptor] = known
        return known

    def _record(
        self,
        ops: Ops,
        descriptor: "BatchExecutionDescriptor",
        manager: "ModelCudaGraphManager",
    ) -> "BatchExecutionDescriptor | None":
        """Record a graph with these ops; None if that fails or is not allowed."""
        if not self._may_record:
            return None
        if ops not in Launch.families:
            Launch.families = (*Launch.families, ops)
        exact = replace(descriptor, tapped=Launch.families.index(ops))
        began = time.perf_counter()
        try:
            manager.residual_recorder(exact)
        except Exception:
            logger.exception(
                "No graph could be recorded while serving; steps continue with those "
                "that are recorded, or without, which is slower but equivalent"
            )
            self._may_record = False
            return None
        self._chosen.clear()  # The new graph may fit other needs as well.
        logger.info(
            "Recorded a CUDA graph for %d tokens with %d ops of taps in %.0f ms",
            descriptor.num_tokens,
            len(ops),
            1e3 * (time.perf_counter() - began),
        )
        return exact
