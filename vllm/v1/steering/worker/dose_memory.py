# SPDX-License-Identifier: Apache-2.0
"""Device memory for the doses of a step's tokens."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from vllm.model_executor.layers.residual.program import NO_GATE
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.receipts import Effect
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation
from vllm.v1.steering.receipts import WHEN
from vllm.v1.steering.worker.gates import Gate, Reader

COLUMNS = 16
"""Columns that are allocated at a time."""


class DoseMemory:
    """Columns for the doses of a step's tokens, shared by all programs.

    A token has one program, so all programs use the same rows. Columns are allocated
    when a receipt is first requested, and more of them as programs have more effects.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self.device = device
        self._blocks: list[torch.Tensor] = []  # [tokens, COLUMNS] each, float32

    def columns(self, count: int) -> list[torch.Tensor]:
        """The first `count` columns, `[tokens]` each."""
        while len(self._blocks) * COLUMNS < count:
            new = torch.empty(self._num_tokens, COLUMNS, device=self.device)
            self._blocks.append(new)
        return [column for block in self._blocks for column in block.unbind(1)][:count]

    def clear(self, stop: int) -> None:
        """Mark the tokens below `stop` as without doses."""
        for block in self._blocks:
            block[:stop].fill_(torch.nan)

    def rows(self, tokens: npt.NDArray[np.intp], count: int) -> torch.Tensor:
        """The first `count` doses of some tokens, `[len(tokens), count]`."""
        index = async_tensor_h2d(tokens, self.device, torch.int64)
        found = torch.cat([block.index_select(0, index) for block in self._blocks], 1)
        return found[:, :count].contiguous()


def measured_effects(
    gates: Iterable[Gate], added: Iterable[Tap], operations: Iterable[Reader]
) -> tuple[tuple[Effect, ...], list[int]]:
    """The effects of a phase, with distinct keys: equal operations are numbered.

    Args:
        gates: all gates that the phase decides.
        added: the hook points of its plain additions.
        operations: its operations.

    Returns:
        The effects, of the gates, the additions and the operations in this order; and
        for each operation the index of its effect.

    """
    found = [
        # A gate has the same column in both phases of a configuration.
        *(
            Effect(one.layer, one.hook, WHEN, str(column), one.name, one.scope)
            for one, column in gates
        ),
        *(Effect(*tap, "add", "") for tap in added),
    ]
    seen: dict[Effect, int] = defaultdict(int)
    places: list[int] = []
    for one, gate, _ in operations:
        joined = _joined_key(one, gate)
        effect = Effect(*one.tap, one.op, joined or one.digest)
        seen[effect] += 1
        if seen[effect] > 1 and joined:
            places.append(found.index(effect))
            continue
        if seen[effect] > 1:
            effect = structs.replace(effect, key=f"{effect.key}#{seen[effect]}")
        places.append(len(found))
        found.append(effect)
    return tuple(found), places


def _joined_key(one: Operation, gate: Gate | None) -> str:
    """A key that is equal for features that one instruction changes; else empty."""
    use = one.details.feature
    if use is None or use.reads is not None:
        return ""
    return f"{use.sae} {use.only_if_active} {NO_GATE if gate is None else gate.column}"
