# SPDX-License-Identifier: Apache-2.0
"""Fields of a response with one or several choices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


def by_choice(
    outputs: Sequence["RequestOutput | None"], part: Callable[["CompletionOutput"], Any]
) -> Any:
    """What the choices of a response to one or several prompts have.

    Args:
        outputs: of each prompt.
        part: what a choice has; falsy if it has nothing.

    Returns:
        The part of a single choice, else the parts by the choice's index as a string.
        None if no choice has one.

    """
    found = [
        part(sample)
        for output in outputs
        if output is not None
        for sample in output.outputs
    ]
    if not any(found):
        return None
    if len(found) == 1:
        return found[0]
    return {str(index): one for index, one in enumerate(found)}
