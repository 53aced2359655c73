# SPDX-License-Identifier: Apache-2.0
"""Which part of a readout is computed in which pipeline stage.

A stage computes what it has the rows for, and only results leave it. A lens is computed
in the last stage, which has the head, and so is what reads rows of several stages at
once: the rows are sent there.
"""

from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm.v1.residual.readout_plan import Readout
from vllm.v1.residual.sizes import stage_starts
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Share:
    """What a process does for one readout."""

    here: tuple[Readout, ...] = ()
    """Parts that it computes from its own rows."""
    sent: Readout | None = None
    """The rows that it contributes to a part that the last stage computes."""
    joined: Readout | None = None
    """In the last stage: the part that it computes from rows that were sent."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages of a model, as one of them sees them."""

    starts: tuple[int, ...] = (0,)
    """The first layer of each stage."""
    own: int = 0
    """The stage of this process."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig", own: int) -> "Stages":
        """The stages of an engine's configuration; `own` is that of this process."""
        return cls(tuple(stage_starts(vllm_config)), own)

    @property
    def is_last(self) -> bool:
        """Whether this process is in the last stage."""
        return self.own == len(self.starts) - 1

    def share(self, readout: Readout, local: Set[Tap]) -> Share:
        """What this process does for a readout.

        Args:
            readout: as in the request's plan.
            local: the taps that are staged in this process.

        """
        here, sent, joined = [], None, None
        for stage, part in self.parts(readout):
            if self._stages(part) == {stage}:
                if stage == self.own and local >= {*part.staged}:
                    here.append(part)
                continue
            if own := tuple(tap for tap in part.staged if tap in local):
                sent = Readout(part.name, "rows", own, part.ranges)
            if self.is_last:
                joined = part
        return Share(tuple(here), sent, joined)

    def parts(self, readout: Readout) -> list[tuple[int, Readout]]:
        """The parts of a readout, each with the stage that computes it.

        At most one of them needs rows of other stages.
        """
        last = len(self.starts) - 1
        stages = self._stages(readout)
        if readout.kind == "lens":
            return [(last, readout)]
        if len(stages) == 1:
            return [(stages.pop(), readout)]
        if readout.kind not in ("rows", "norm", "attention"):
            return [(last, readout)]
        taps: dict[int | None, list[Tap]] = {}
        for tap in readout.taps:  # None: a norm's cosine to a row of the stage before.
            needs = self._stages(replace(readout, taps=(tap,)))
            taps.setdefault(needs.pop() if len(needs) == 1 else None, []).append(tap)
        return [
            (last if stage is None else stage, replace(readout, taps=tuple(own)))
            for stage, own in taps.items()
        ]

    def _stages(self, readout: Readout) -> set[int]:
        """The stages that have the rows that a readout reads."""
        return {bisect_right(self.starts, layer) - 1 for layer, _ in readout.staged}
