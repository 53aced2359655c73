# SPDX-License-Identifier: Apache-2.0
"""Libraries that upstream's models need on a GPU, and that not every machine has.

Upstream's wheel for GPUs includes or requires them; a machine with a partial
installation may lack them. A case lists what it needs, and is skipped without it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """A library that upstream itself looks for."""

    check: str
    """The function of upstream's `import_utils` that checks for it."""
    reason: str
    """The reason why the comparison needs it."""

    def is_met(self) -> bool:
        """Whether it can be imported here."""
        from vllm.utils import import_utils

        return bool(getattr(import_utils, self.check)())


CUTLASS = Need(
    "has_cutedsl",
    "upstream's model of it imports `cutlass`, CUTLASS's Python DSL, which is not"
    " installed",
)
DEEP_GEMM = Need(
    "has_deep_gemm",
    "upstream's indexer of sparse attention requires DeepGEMM, which is not there",
)
