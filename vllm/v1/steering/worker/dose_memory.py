# SPDX-License-Identifier: Apache-2.0
"""Device memory for the doses of a step's tokens."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from msgspec import structs

from vllm.v1.steering.operations import Operation
from vllm.v1.steering.plan import Tap
from vllm.v1.steering.receipts import Effect, effect_of
from vllm.v1.steering.worker.gates import Gate

FIRST_COLUMNS = 16


class DoseMemory:
    """Memory for the doses of a step's tokens, shared by all programs.

    A token has one program, so all programs use the same rows. The memory is allocated
    when a receipt is first requested, and replaced by more if a program has more
    effects; programs keep the memory that they were made for.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._device = device
        self._memory: torch.Tensor | None = None

    def with_columns(self, count: int) -> torch.Tensor:
        """Memory of at least `count` columns, float32 `[tokens, columns]`."""
        if self._memory is None or self._memory.shape[1] < count:
            columns = FIRST_COLUMNS
            while columns < count:
                columns *= 2
            self._memory = torch.empty(self._num_tokens, columns, device=self._device)
        return self._memory


def measured_effects(
    gates: Iterable[Gate], added: Iterable[Tap], operations: Iterable[Operation]
) -> tuple[Effect, ...]:
    """The effects of a phase, with distinct keys: equal operations are numbered.

    Args:
        gates: all gates that the phase decides.
        added: the hook points of its plain additions.
        operations: its operations.

    Returns:
        An effect for each of them, in this order.

    """
    seen: dict[Effect, int] = defaultdict(int)
    found = []
    effects: Sequence[Effect] = [
        *(effect_of(gate.condition, gate.column) for gate in gates),
        *(Effect(*tap, "add", "") for tap in added),
        *(Effect(*one.tap, one.op, one.digest) for one in operations),
    ]
    for one in effects:
        seen[one] += 1
        again = f"{one.key}#{seen[one]}"
        found.append(one if seen[one] == 1 else structs.replace(one, key=again))
    return tuple(found)
