# SPDX-License-Identifier: Apache-2.0
"""Counts of the tokens at which conditions have fired, for metrics.

Probes count on the device. After each step with conditions the counts are copied to the
host without waiting for it, and go out with the step's output.
"""

import torch

from vllm.v1.residual.receipts import Fired, FiredLabel
from vllm.v1.steering.conditions import Condition

MOST_CONDITIONS = 256
"""Most conditions that are counted separately; further ones are counted together."""
OTHERS: FiredLabel = ("others", -1, "")
"""The label of these."""


class FiredCounts:
    """The counts of one worker. Its tensors keep their addresses."""

    def __init__(self, device: torch.device) -> None:
        size, on_device = MOST_CONDITIONS + 1, device.type != "cpu"
        self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=on_device)
        self._places: dict[FiredLabel, int] = {}
        self._reported: list[int] = []
        self.earlier: torch.Tensor | None = None  # [MOST_CONDITIONS + 1], int64
        """The counts of earlier pipeline stages, where conditions have equal places."""

    def place(self, condition: Condition) -> int:
        """The index of a condition's count."""
        label = condition.name, condition.layer, condition.hook
        if label not in self._places and len(self._places) >= MOST_CONDITIONS:
            label = OTHERS
        return self._places.setdefault(label, len(self._places))

    def of(self, condition: Condition) -> torch.Tensor:
        """The count of a condition, int64 `[1]`, for its probe to increase."""
        place = self.place(condition)
        return self._counts[place : place + 1]

    def grow(self, place: int, count: torch.Tensor) -> None:
        """Count decisions, whose number is on the device."""
        self._counts[place] += count

    def send(self) -> None:
        """Start the copy to the host, after a pass with conditions is queued."""
        count = len(self._places)
        self._host[:count].copy_(self.total()[:count], non_blocking=True)

    def total(self) -> torch.Tensor:
        """The counts of this stage and earlier ones, on the device."""
        return self._counts if self.earlier is None else self._counts + self.earlier

    def collect(self) -> Fired:
        """What was counted since the last call; the last copy must be complete."""
        labels = list(self._places)
        counts = self._host[: len(labels)].tolist()
        before = self._reported + [0] * (len(labels) - len(self._reported))
        self._reported = counts
        grown = zip(labels, counts, before, strict=True)
        return [(*label, now - old) for label, now, old in grown if now != old]
