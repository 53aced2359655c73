# SPDX-License-Identifier: Apache-2.0
"""Which token of the source prompt each token of the target prompt stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two prompts that agree in their first and their last tokens.

    Prompts of equal length are aligned position by position. Of other prompts the
    common beginning keeps its positions, the common end is shifted, and the tokens
    between them have no counterpart.
    """

    num_source: int
    num_target: int
    prefix: int
    """Number of tokens in which both begin alike."""
    suffix: int
    """Number of further tokens in which both end alike."""

    def source_of(self, position: int) -> int | None:
        """The position in the source of one in the target; None if it has none."""
        if self.num_source == self.num_target or position < self.prefix:
            return position
        if position >= self.num_target - self.suffix:
            return position + self.num_source - self.num_target
        return None

    def as_json(self) -> dict[str, Any]:
        """Lengths and unaligned positions, as plain data."""
        middle = range(self.prefix, self.num_target - self.suffix)
        return {
            "n_clean": self.num_source,
            "n_corrupt": self.num_target,
            "prefix_len": self.prefix,
            "suffix_len": self.suffix,
            "unaligned_positions": [p for p in middle if self.source_of(p) is None],
        }


def align(source: Sequence[int], target: Sequence[int]) -> Alignment:
    """Align two prompts, given as token ids."""
    shorter = min(len(source), len(target))
    prefix = _common(source, target, shorter)
    suffix = _common(source[::-1], target[::-1], shorter - prefix)
    return Alignment(len(source), len(target), prefix, suffix)


def _common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    pairs = zip(one[:most], other[:most], strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), most)
