# SPDX-License-Identifier: Apache-2.0
"""How layers and tokens are spread over ranks, which limits conditions and receipts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.residual.tap import DIVIDED_POINTS, Tap
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """How a server spreads a model over its ranks."""

    splits_tokens: bool = False
    """Whether tensor-parallel ranks split the tokens of some layers."""
    drafts: bool = False
    """Whether speculative decoding computes tokens that may be rejected."""
    ranks: int = 1
    """How many tensor-parallel ranks divide the rows of `DIVIDED_POINTS`."""

    @property
    def no_receipt(self) -> str:
        """Why requests cannot have receipts; empty if they can."""
        if self.splits_tokens:
            return (
                "this server splits the tokens of some layers over its ranks, and no "
                "rank has the doses of all; leave it out, or start the server without "
                "sequence parallelism"
            )
        return ""

    def check(self, probe: Tap, at: str) -> None:
        """Refuse a condition whose decision would have to travel between ranks.

        Between pipeline stages it does.

        Args:
            probe: where the condition's probe reads.
            at: the parameter's name in messages.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """
        if self._divides(probe):
            raise fail(
                f"{at}: each of {self.ranks} tensor-parallel ranks has some of the "
                f"numbers of {probe[1]}, so that none can decide; read attn_in, "
                "attn_out, mlp_in, mlp_out or a point of the stream",
                at,
                probe,
            )
        if self.splits_tokens:
            raise fail(
                f"{at}: this server splits the tokens of some layers over its ranks, "
                "and a decision does not travel between them; start it without "
                "sequence parallelism to use conditions",
                at,
                probe,
            )

    def check_entry(self, tap: Tap, op: str, norm_match: bool, at: str) -> None:
        """Refuse an operation that needs whole rows where ranks divide them.

        Args:
            tap: where it acts.
            op: its name.
            norm_match: whether it scales by the norm of the row.
            at: the parameter's name in messages.

        Raises:
            SteeringValidationError: naming the parameter, the value and the remedy.

        """
        if self._divides(tap) and (norm_match or op not in ("add", "replace")):
            raise fail(
                f"{at}: {'norm_match' if norm_match else op} needs whole rows, and "
                f"each of {self.ranks} tensor-parallel ranks has some of the numbers "
                f"of {tap[1]}; use add or replace, or a point of the stream",
                at,
                op,
            )

    def check_receipt(self, taps: Iterable[Tap]) -> None:
        """Refuse a receipt of entries where no rank has whole rows."""
        for tap in filter(self._divides, taps):
            raise fail(
                f"steering_receipt: no rank has the whole rows of {tap[1]}, of which "
                f"each of {self.ranks} has a part, to measure doses; leave it out",
                "steering_receipt",
                True,
            )

    def _divides(self, tap: Tap) -> bool:
        return self.ranks > 1 and tap[1] in DIVIDED_POINTS


ONE_RANK = Placement()


def placement_of(vllm_config: "VllmConfig") -> Placement:
    """The placement of an engine's configuration."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    splits = ranks > 1 and parallel.use_sequence_parallel_moe
    return Placement(splits, vllm_config.num_speculative_tokens > 0, ranks)
