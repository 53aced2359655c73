# SPDX-License-Identifier: Apache-2.0
"""Cases for tests of the comparison itself: their models are never created."""

from tests.parity.cases import Case, common


def case(variant: str) -> Case:
    """A case of an architecture that does not exist."""
    return Case(
        architecture="ToyForCausalLM",
        model_type="llama",
        variant=variant,
        options=common(),
    )
