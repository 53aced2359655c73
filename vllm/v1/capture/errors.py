# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong about capture, as upstream's client errors (HTTP 400)."""

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import cut, shown


class CaptureValidationError(VLLMValidationError, ValueError):
    """A capture request that cannot be carried out as it stands.

    The message names the parameter, the value and the remedy. It is a
    `ValueError` too, which is what offline users catch.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: Any = None
    ) -> None:
        """Cut what is long: a client may have sent megabytes.

        Args:
            message: says what is wrong and what to do.
            parameter: the parameter's name.
            value: what was given; shown as text where it is not a number.

        """
        if value is not None and not isinstance(value, (int, float)):
            value = value if isinstance(value, str) else shown(value)
            value = value if len(value) <= 120 else value[:117] + "..."
        name = None if parameter is None else cut(parameter)
        super().__init__(cut(message), parameter=name, value=value)


class UnknownCaptureConsumerError(CaptureValidationError):
    """A consumer name that this server does not have."""
