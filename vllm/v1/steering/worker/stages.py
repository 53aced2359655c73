# SPDX-License-Identifier: Apache-2.0
"""Gates, counts and doses that cross the borders of pipeline stages.

A probe may read, or a transcoder, in an earlier stage than that in which the entry
acts. The stage that reads decides, and keeps the decisions that hold for later tokens.
The gates of the step's tokens travel with their hidden states, and the next stage
writes them where its own probes would have. The last stage gets the counts of all
conditions, and the doses of requests with a receipt. All stages have the same batch in
the same order, and assign the same columns.

Legend: T tokens of the step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.program import GATE_COLUMNS, OPENED, SEGMENT
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import Gate, Reader

if TYPE_CHECKING:
    from vllm.v1.steering.worker.doses import StepDoses

GATES, COUNTS, DOSES = "steering_gates", "steering_fired", "steering_doses"
"""Names of the entries of the intermediate tensors."""
NAMES = frozenset((GATES, COUNTS, DOSES))


class Crossing(NamedTuple):
    """What one phase of a configuration exchanges with other stages."""

    received: frozenset[int] = frozenset()
    """The columns of gates that earlier stages write, and this or a later one reads."""
    sends: bool = False
    """Whether a later stage reads what this or an earlier one writes."""

    @property
    def is_used(self) -> bool:
        """Whether anything is exchanged."""
        return self.sends or bool(self.received)


def crossing_of(readers: Iterable[Reader], taps: Collection[Tap]) -> Crossing:
    """Find what crosses the borders of the stage with these hook points.

    Args:
        readers: all operations of a phase, also those of other stages.
        taps: the hook points of this stage, whose layers are consecutive.

    """
    layers = [layer for layer, _ in taps]
    if not layers:
        return Crossing()
    first, last = min(layers), max(layers)
    received: set[int] = set()
    sends = False
    for one in readers:
        acts = one[0].tap[0]
        for (layer, _), columns in _reads(*one):
            if layer < first <= acts:
                received |= columns
            sends = sends or layer <= last < acts
    return Crossing(frozenset(received), sends)


def _reads(
    one: Operation, gate: Gate | None, column: int
) -> Iterator[tuple[Tap, set[int]]]:
    """The hook points of an operation's probe and transcoder, and their columns."""
    if gate is not None:
        columns = {gate.column}
        if gate.condition.in_prompt:
            columns |= {OPENED + gate.column, SEGMENT}
        yield gate.condition.tap, columns
    use = one.details.feature
    if use is not None and use.carries and use.reads is not None:
        yield use.reads, {column}


class StageGates:
    """What the current step receives and sends. Engine thread only."""

    def __init__(
        self, device: torch.device, fired: FiredCounts, doses: "StepDoses"
    ) -> None:
        """Start without any.

        Args:
            device: of the gates.
            fired: counts of conditions, to which those of earlier stages are added.
            doses: of the step, to which those of earlier stages are added.

        """
        self._device = device
        self._fired = fired
        self._doses = doses
        self._taken: torch.Tensor | None = None  # [T, GATE_COLUMNS], bool
        """Which gates are those of earlier stages."""
        self._num_sent = 0
        """Number of tokens whose gates are sent."""
        self._arriving: tuple[dict[str, Any], Callable[[], None]] | None = None
        self.has_counts = False
        """Whether earlier stages have sent counts with the current step."""

    def plan_nothing(self) -> None:
        """Plan a pass without such gates."""
        self._taken, self._num_sent = None, 0

    def plan(
        self, rows: npt.NDArray[np.int32], crossings: Mapping[int, Crossing]
    ) -> None:
        """Plan what the next pass exchanges.

        Args:
            rows: `[T]`, the table row of each token.
            crossings: by table row, for rows that exchange anything.

        """
        self.plan_nothing()
        taken = np.zeros((len(rows), GATE_COLUMNS), dtype=bool)
        for row, one in crossings.items():
            tokens = np.flatnonzero(rows == row)
            if not len(tokens):
                continue
            columns = np.array(sorted(one.received), dtype=np.intp)
            taken[np.ix_(tokens, columns)] = True
            if one.sends:
                self._num_sent = len(rows)
        if taken.any():
            self._taken = async_tensor_h2d(taken, self._device, torch.bool)

    def receive(self, tensors: dict[str, Any], wait: Callable[[], None]) -> None:
        """Note what the previous stage has sent with a step.

        Args:
            tensors: the step's intermediate tensors, which may still arrive.
            wait: returns when they have.

        """
        self.has_counts = COUNTS in tensors
        self._arriving = None if NAMES.isdisjoint(tensors) else (tensors, wait)

    def load(self, gates: torch.Tensor) -> None:
        """Write what was received to the gates `[>= T, GATE_COLUMNS]`.

        Called after decisions that this stage holds were written: it has columns for
        all, and those of other stages' conditions are overwritten.
        """
        if self._arriving is None:
            return
        (arriving, wait), self._arriving = self._arriving, None
        wait()
        tensors = {name: arriving.pop(name) for name in NAMES & arriving.keys()}
        if COUNTS in tensors:
            self._fired.earlier = tensors[COUNTS]
        self._doses.earlier = tensors.get(DOSES)
        if self._taken is None:
            return
        # As integers: some columns hold int32, of which some bits are a NaN.
        found = tensors[GATES].view(torch.int32)
        own = gates[: len(found)].view(torch.int32)
        own.copy_(torch.where(self._taken, found, own))

    def send(
        self, tensors: dict[str, Any], gates: torch.Tensor, decides: bool
    ) -> dict[str, Any]:
        """The intermediate tensors of a step, with what later stages read.

        Args:
            tensors: those of the model.
            gates: as the pass has left them, `[>= T, GATE_COLUMNS]`.
            decides: whether this stage has decided conditions.

        """
        added = {}
        if self._num_sent:  # A copy, because the next step may begin before it is sent.
            added[GATES] = gates[: self._num_sent].clone()
        if decides or self.has_counts:
            added[COUNTS] = self._fired.total().clone()
        doses = self._doses.take_sent()
        if doses is not None:
            added[DOSES] = doses
        return {**tensors, **added} if added else tensors
