# SPDX-License-Identifier: Apache-2.0
"""Cases for tests of the proof itself: no model of theirs is made."""

from tests.parity.cases import Case, common


def case(variant: str) -> Case:
    """A case of an architecture that there is not."""
    return Case(
        architecture="ToyForCausalLM",
        model_type="llama",
        variant=variant,
        options=common(),
    )
