# SPDX-License-Identifier: Apache-2.0
"""Errors in capture requests, as subclasses of upstream's client error (HTTP 400)."""

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import cut, shown


class CaptureValidationError(VLLMValidationError, ValueError):
    """A capture request or configuration that is invalid.

    The message names the parameter, the value and the remedy. It is also a
    `ValueError`, which offline callers catch.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: Any = None
    ) -> None:
        """Shorten long texts: a client may have sent megabytes.

        Args:
            message: what is wrong and what to do about it.
            parameter: the name of the invalid parameter.
            value: its value; converted to text unless it is a number.

        """
        if value is not None and not isinstance(value, (int, float)):
            value = value if isinstance(value, str) else shown(value)
            value = value if len(value) <= 120 else value[:117] + "..."
        name = None if parameter is None else cut(parameter)
        super().__init__(cut(message), parameter=name, value=value)


class UnknownCaptureConsumerError(CaptureValidationError):
    """A consumer name that is not installed or not configured on this server."""


def fail(message: str, parameter: str, value: Any) -> CaptureValidationError:
    """The error for `parameter`, with long values shortened; the caller raises it."""
    return CaptureValidationError(message, parameter=parameter, value=shown(value))
