# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong about readouts, as upstream's client error (HTTP 400)."""

import reprlib
from typing import Any

from vllm.exceptions import VLLMValidationError


class ReadoutValidationError(VLLMValidationError, ValueError):
    """A readout that cannot be carried out as it stands.

    The message names the parameter, the value and the remedy. It is a `ValueError`
    too, which is what offline users catch.
    """


def fail(message: str, parameter: str, value: Any) -> ReadoutValidationError:
    """The error for `parameter`; long values are shortened in the message."""
    return ReadoutValidationError(
        message, parameter=parameter, value=reprlib.repr(value)
    )
