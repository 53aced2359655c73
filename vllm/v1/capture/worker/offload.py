# SPDX-License-Identifier: Apache-2.0
"""When the rows of steps leave staging memory: as many at once as can wait."""

from collections.abc import Collection

from vllm.v1.capture.dispatch.dispatcher import Dispatcher
from vllm.v1.capture.dispatch.step_chain import StagedStep
from vllm.v1.capture.staging.ring import Segment, Staging

STEPS_AT_ONCE = 128
"""Steps whose rows are handed on together, if they are small."""


class Offload:
    """Steps on their way to the dispatcher, on the engine's thread.

    First their rows are copied to the host, several steps at once; then the dispatcher
    has them, and its requests get theirs once many steps have come together.
    """

    def __init__(self, staging: Staging, dispatcher: Dispatcher) -> None:
        """Begin with no step."""
        self._staging = staging
        self._dispatcher = dispatcher
        self._unsent: list[StagedStep] = []
        self._steps = 0
        """That are not sent, or that wait with the dispatcher; ..."""
        self._rows = 0
        """... and their rows."""

    def reserve(self, num_rows: int) -> Segment:
        """Room for a step's rows; waits for it, if need be."""
        ring = self._staging.ring
        segment = ring.reserve(num_rows, timeout=0.0)
        if segment is None:
            self.hand_on()  # What waits takes room and would keep it.
            segment = ring.reserve(num_rows)
        assert segment is not None
        return segment

    def add(self, step: StagedStep, at_once: Collection[str]) -> None:
        """A step that is queued on the device; some requests want their rows now."""
        if self._add_pages(step):
            return
        self._unsent.append(step)
        self._steps += 1
        self._rows += step.segment.num_rows
        if (
            step.true_starts is not None  # It goes on from no other.
            or self._steps >= STEPS_AT_ONCE
            or self._rows >= self._staging.ring.num_rows // 8
        ):
            self.hand_on()
        elif at_once:
            self.send()
            self._dispatcher.hand_on(tuple(at_once))

    def _add_pages(self, step: StagedStep) -> bool:
        """Send a step of many rows by itself, prompts' rows to memory of their own."""
        sent = self._staging.to_pages(step.segment, step.placed.layout.blocks)
        if sent is None:
            return False
        self.send()  # What came before stays before.
        places, copied = sent
        self._dispatcher.steps([step._replace(places=places)], copied)
        self._steps += 1
        self.hand_on()
        return True

    def send(self) -> None:
        """Start copying what has been computed, and let the dispatcher have it."""
        if not self._unsent:
            return
        steps, self._unsent = self._unsent, []
        copied = self._staging.to_host([step.segment for step in steps])
        self._dispatcher.steps(steps, copied)

    def hand_on(self) -> None:
        """Let the requests have all rows."""
        if not self._steps:
            return
        self.send()
        self._dispatcher.hand_on()
        self._steps = self._rows = 0
