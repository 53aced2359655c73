# SPDX-License-Identifier: Apache-2.0
"""Errors of steering: mistakes in requests (HTTP 400, 404) and failed changes (500)."""

from vllm.exceptions import (
    VLLMServerError,
    VLLMValidationError,
)
from vllm.v1.residual.bounds import failing


class SteeringValidationError(VLLMValidationError, ValueError):
    """A steering request that is invalid, or that this server cannot carry out.

    The message names the parameter, the value and the remedy. The class is a
    `ValueError` too, which offline users catch.
    """


class UnknownModuleError(SteeringValidationError):
    """A module name that is to be removed and does not exist (HTTP 404)."""


class SteeringChangeError(VLLMServerError, RuntimeError):
    """A rank failed to change the global vectors, so no rank has changed (HTTP 500)."""


fail = failing(SteeringValidationError)
"""`fail(message, parameter, value)` makes a validation error."""


def as_refused(error: Exception) -> Exception:
    """Convert an error of the engine core to the exception that the front end raises.

    An engine core in another process sends the error's text only.
    """
    if isinstance(error, (SteeringValidationError, SteeringChangeError)):
        return error
    text = str(error).partition("_steering method failed: ")[2]
    if text.startswith("vectors: "):
        message = text.partition(" (parameter=")[0]
        return SteeringValidationError(message, parameter="vectors")
    return SteeringChangeError(text) if text else error
