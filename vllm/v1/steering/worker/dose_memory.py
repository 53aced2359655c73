# SPDX-License-Identifier: Apache-2.0
"""Device memory for the doses of a step's tokens."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from msgspec import structs

from vllm.v1.steering.receipts import Effect

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


def measured_effects(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """Effects with distinct keys: operations that are equal are numbered."""
    seen: dict[Effect, int] = defaultdict(int)
    found = []
    for one in effects:
        seen[one] += 1
        again = f"{one.key}#{seen[one]}"
        found.append(one if seen[one] == 1 else structs.replace(one, key=again))
    return tuple(found)
