# SPDX-License-Identifier: Apache-2.0
"""The steps of a request, simulated without an engine.

A valid row has its position in every element, at every tap; an invalid row (a rejected
draft, a row past the end) has -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

WIDTH = 2
VOID = -1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that computes positions `[start, start + len(values))`."""

    start: int
    values: tuple[float, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:  # [stop - start, WIDTH]
        values = self.values[start - self.start : stop - self.start]
        return torch.tensor(values).unsqueeze(1).repeat(1, WIDTH)


@dataclass(frozen=True, slots=True)
class Life:
    """All steps of a request, and how it ended for the client."""

    num_prompt_tokens: int
    steps: tuple[Step, ...]
    counted: int
    """Number of valid generated tokens; fewer than the engine sampled after a stop
    string or an abort."""
    computed: int
    """Positions below this were computed at least once, with valid rows."""
    settled: bool = True
    """Whether no tokens remained to be recomputed after a preemption at the end."""

    @property
    def stop(self) -> int:
        return self.num_prompt_tokens + max(self.counted - 1, 0)


@st.composite
def lives(draw: st.DrawFn, most_drafts: int = 3) -> Life:
    """Random combinations of chunked prefill, drafts, preemptions and overshoot."""
    prompt = draw(st.integers(1, 10))
    known, computed, furthest = prompt, 0, 0
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 12))):
        if computed and draw(st.integers(0, 5)) == 0:  # preempted, resumed anywhere
            computed = draw(st.integers(0, computed))
        if known - computed > 1 and draw(st.booleans()):  # a chunk of it
            chunk, accepted = draw(st.integers(1, known - computed - 1)), -1
            values = [float(computed + i) for i in range(chunk)]
        else:
            drafts = draw(st.integers(0, most_drafts))
            accepted = draw(st.integers(0, drafts))
            chunk = known - computed
            values = [float(computed + i) for i in range(chunk + accepted)]
            values += [VOID] * (drafts - accepted)
        steps.append(Step(computed, tuple(values)))
        computed += chunk + max(accepted, 0)
        known += accepted + 1
        furthest = max(furthest, computed)
    generated = known - prompt
    counted = draw(st.integers(0, generated))
    return Life(prompt, tuple(steps), counted, furthest, computed == furthest)


def standing(life: Life, selected: Sequence[int]) -> list[int]:
    """The selected positions whose rows the client must receive."""
    return [p for p in selected if p < min(life.stop, life.computed)]
