# SPDX-License-Identifier: Apache-2.0
"""Fields of a response with one or several choices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


def by_choice(
    outputs: Sequence["RequestOutput | None"], part: Callable[["CompletionOutput"], Any]
) -> Any:
    """A field of a response, collected from the choices of one or several prompts.

    Args:
        outputs: of each prompt.
        part: returns a choice's value; a falsy value means none.

    Returns:
        The value of a single choice, else the values by the choice's index as a string.
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
