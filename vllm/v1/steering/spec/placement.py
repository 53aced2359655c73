# SPDX-License-Identifier: Apache-2.0
"""How layers and tokens are spread over ranks, which limits conditions and receipts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.residual.tap import Tap
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
        if self.splits_tokens:
            raise fail(
                f"{at}: this server splits the tokens of some layers over its ranks, "
                "and a decision does not travel between them; start it without "
                "sequence parallelism to use conditions",
                at,
                probe,
            )


ONE_RANK = Placement()


def placement_of(vllm_config: "VllmConfig") -> Placement:
    """The placement of an engine's configuration."""
    parallel = vllm_config.parallel_config
    splits = parallel.tensor_parallel_size > 1 and parallel.use_sequence_parallel_moe
    return Placement(splits, vllm_config.num_speculative_tokens > 0)
