# SPDX-License-Identifier: Apache-2.0
"""Batches the copies of steps' rows from staging memory to the host."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.dispatch.dispatcher import Dispatcher
from vllm.v1.capture.dispatch.step_buffer import StagedStep
from vllm.v1.capture.sink import RowEncoder
from vllm.v1.capture.staging.ring import Parts, Segment, Staging
from vllm.v1.residual.capture_plan import LIVE
from vllm.v1.residual.step_layout import Layout, PlacedStep

logger = init_logger(__name__)

STEPS_AT_ONCE = 128
"""Maximum number of steps whose rows are passed on together."""

BYTES_AT_ONCE = 4 << 20
"""Bytes per request that are passed on together.

Each time takes a request about 15 us of Python. What is left at its end delays its
result: the copies to the host, and from there to the request's own memory.
"""


COMMON_END_BYTES = 1 << 20
"""Bytes per step from which rows of requests that end at the same step leave early."""


class Offload:
    """Sends steps to the dispatcher; used on the engine's thread only.

    `send` copies the rows of several steps to the host at once and gives the steps to
    the dispatcher. `hand_on` makes the dispatcher distribute them to their requests,
    which is cheaper for many steps together.

    When many requests reach their greatest length at the same step, what then waits
    delays all of their results. Before that step, rows are handed on as soon as as many
    steps wait as remain: 8, 4, 2, 1 of the last 15, and with the last step its own.
    """

    def __init__(self, staging: Staging, dispatcher: Dispatcher) -> None:
        """Start without steps."""
        self._staging = staging
        self._dispatcher = dispatcher
        self._unsent: list[StagedStep] = []
        self._steps = 0
        """Number of steps that are unsent, or sent but not handed on."""
        self._rows = 0
        """Number of rows of these steps."""
        row_bytes = staging.host_rows[:1].nbytes
        self._most_rows = max(BYTES_AT_ONCE // row_bytes, 1)
        self._common_end_rows = max(COMMON_END_BYTES // row_bytes, 1)
        self._last_positions: dict[str, int] = {}
        """By request of known length, the position of its last row."""
        self._common_end: tuple[int, int | None] = -1, None
        """The number of a layout, and the shift at which many of its requests end."""

    def expect(self, req_id: str, last_position: int) -> None:
        """Note where a request ends at the latest."""
        self._last_positions[req_id] = last_position

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._last_positions.pop(req_id, None)

    def reserve(self, num_rows: int) -> Segment:
        """Reserve staging rows for a step; blocks until there is room."""
        ring = self._staging.ring
        segment = ring.reserve(num_rows, timeout=0.0)
        if segment is None:
            self.hand_on()  # Waiting steps occupy the ring and would not free it.
            segment = ring.reserve(num_rows)
        assert segment is not None
        return segment

    def add(
        self, step: StagedStep, at_once: Collection[str], parts: Parts = ()
    ) -> None:
        """Add a step that is queued on the device.

        Args:
            step: the step.
            at_once: requests whose rows are to be passed on with this step.
            parts: of the taps of a large step; see `Staging.to_pages`.

        """
        if self._add_pages(step, parts):
            return
        self._unsent.append(step)
        self._steps += 1
        self._rows += step.segment.num_rows
        if (
            step.true_starts is not None  # It cannot join a chain of steps.
            or self._steps >= STEPS_AT_ONCE
            or self._rows >= self._staging.ring.num_rows // 8
            or self._rows >= self._most_rows * _num_requests(step)
            or self._steps >= self._steps_to_common_end(step.placed)
        ):
            self.hand_on()
        elif at_once:
            self.send()
            self._dispatcher.hand_on(tuple(at_once))

    def lose(self, step: StagedStep) -> None:
        """Release the memory of a step that `add` has failed to send."""
        if any(step is one for one in self._unsent):
            return
        self.send()  # Memory is released in the order of steps.
        self._dispatcher.lose([step])

    def _steps_to_common_end(self, placed: PlacedStep) -> int:
        """How many steps remain until many requests end together."""
        layout = placed.layout
        if self._common_end[0] != layout.number:
            self._common_end = layout.number, self._common_end_of(layout)
        shift = self._common_end[1]
        if shift is None or shift < placed.shift:
            return STEPS_AT_ONCE
        return shift - placed.shift

    def _common_end_of(self, layout: Layout) -> int | None:
        """The first shift at which enough rows have their request's last one."""
        if layout.num_rows < self._common_end_rows:
            return None
        rows: defaultdict[int, int] = defaultdict(int)
        for block in layout.blocks:
            for req_id, row in block.decoding.items():
                if (last := self._last_positions.get(req_id)) is not None:
                    rows[last - row.origin] += len(block.columns)
        least = self._common_end_rows
        return min((end for end, count in rows.items() if count >= least), default=None)

    def _add_pages(self, step: StagedStep, parts: Parts) -> bool:
        """Send a step of many rows alone, with the rows of prompts copied to pages."""
        blocks = step.placed.layout.blocks
        sent = self._staging.to_pages(step.segment, blocks, parts)
        if sent is None:
            return False
        self.send()  # Keeps the order of steps.
        places, copied = sent
        self._dispatcher.steps([step._replace(places=places)], copied)
        self._steps += 1
        self.hand_on()
        return True

    def send(self) -> None:
        """Start to copy the unsent steps to the host; give them to the dispatcher."""
        if not self._unsent:
            return
        steps, self._unsent = self._unsent, []
        try:
            copied = self._staging.to_host([step.segment for step in steps])
        except Exception:
            # Each request detects its missing rows at its end.
            logger.exception("The rows of %d steps could not be copied", len(steps))
            self._dispatcher.lose(steps)
        else:
            self._dispatcher.steps(steps, copied)

    def hand_on(self) -> None:
        """Have the dispatcher distribute all rows to their requests."""
        if not self._steps:
            return
        self.send()
        self._dispatcher.hand_on()
        self._steps = self._rows = 0


def _num_requests(step: StagedStep) -> int:
    """The number of decoding requests, those with several groups counted as often."""
    blocks = step.placed.layout.blocks
    return max(sum([len(block.decoding) for block in blocks]), 1)


def row_encoder(
    lanes: Mapping[str, SinkLane], width: int, dtype: torch.dtype, device: torch.device
) -> RowEncoder | None:
    """The encoder of a worker's only consumer, if it has one and there is a GPU.

    On a CPU no row is copied to the host, and encoding whole sequences at their end is
    faster than encoding the rows of each step.

    Args:
        lanes: by instance.
        width: values per row.
        dtype: of the rows.
        device: the device of the model.

    """
    takers = [lane for name, lane in lanes.items() if name != LIVE]
    if not crosses_to_host(device) or len(takers) != 1:
        return None
    encoder_of = takers[0].can.row_encoder
    return None if encoder_of is None else encoder_of(width, dtype, device)


def crosses_to_host(device: torch.device) -> bool:
    """Whether rows are computed in other memory than the host's."""
    return device.type != "cpu"
