# SPDX-License-Identifier: Apache-2.0
"""Client errors for readouts (HTTP 400)."""

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import cut, shown


class ReadoutValidationError(VLLMValidationError, ValueError):
    """A request's readouts, or an option for them, are invalid.

    The message names the parameter, the value and the remedy. Also a `ValueError`,
    which offline users catch.
    """


def fail(message: str, parameter: str, value: Any) -> ReadoutValidationError:
    """The error for `parameter`; long texts and values are shortened."""
    return ReadoutValidationError(
        cut(message), parameter=cut(parameter), value=shown(value)
    )
