# SPDX-License-Identifier: Apache-2.0
"""Client errors for readouts (HTTP 400)."""

import reprlib
from typing import Any

from vllm.exceptions import VLLMValidationError


class ReadoutValidationError(VLLMValidationError, ValueError):
    """A request's readouts, or an option for them, are invalid.

    The message names the parameter, the value and the remedy. Also a `ValueError`,
    which offline users catch.
    """


def fail(message: str, parameter: str, value: Any) -> ReadoutValidationError:
    """The error for `parameter`; long values are shortened in the message."""
    return ReadoutValidationError(
        message, parameter=parameter, value=reprlib.repr(value)
    )
