# SPDX-License-Identifier: Apache-2.0
"""What reads staged rows on the device; readouts do."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm.v1.residual.readout_plan import Fired, ReadoutCounters, ReadoutPlan
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.step_layout import PlacedStep
from vllm.v1.residual.step_view import StepView


class RowReader(Protocol):
    """Called on the engine's thread, with the steps whose rows capture has staged."""

    @property
    def counters(self) -> dict[str, ReadoutCounters]:
        """By what is computed; another thread reads them."""

    def add_request(
        self,
        req_id: str,
        plan: ReadoutPlan,
        groups: tuple[LocalGroup, ...],
        num_prompt_tokens: int,
        adapter: int = 0,
    ) -> None:
        """Add a request, with the number of its LoRA adapter, when it first runs."""

    def remove(self, req_id: str) -> None:
        """Drop a finished request."""

    def run(
        self,
        placed: PlacedStep | None,
        view: StepView,
        staging: torch.Tensor,
        first_row: int,
        attention: Any = None,
    ) -> None:
        """Read the rows of a step, after its forward pass."""

    def tell(self, told: Callable[[Fired], None]) -> None:
        """Have `told` called, on any thread, with what the rules of a step keep."""

    def fail(self, view: StepView, error: Exception) -> None:
        """Let an error be the result of a step."""
