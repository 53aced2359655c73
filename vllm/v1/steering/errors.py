# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong about steering, as upstream's client error (HTTP 400)."""

from typing import Any

from vllm.exceptions import (
    VLLMServerError,
    VLLMValidationError,
)
from vllm.v1.residual.bounds import cut, shown


class SteeringValidationError(VLLMValidationError, ValueError):
    """A steering request that cannot be carried out as it stands.

    The message names the parameter, the value and the remedy. It is a
    `ValueError` too, which is what offline users catch.
    """


class UnknownModuleError(SteeringValidationError):
    """A name that shall be removed and that there is not (HTTP 404)."""


class SteeringChangeError(VLLMServerError, RuntimeError):
    """A rank could not take a change of the global vectors, so none has (HTTP 500)."""


def fail(message: str, parameter: str, value: Any) -> SteeringValidationError:
    """The error for `parameter`; long values are shortened in the message."""
    return SteeringValidationError(
        cut(message), parameter=cut(parameter), value=shown(value)
    )


def as_refused(error: Exception) -> Exception:
    """The error for a change that the engine core did not make.

    From another process there comes its text only.
    """
    if isinstance(error, (SteeringValidationError, SteeringChangeError)):
        return error
    text = str(error).partition("_steering method failed: ")[2]
    if text.startswith("vectors: "):
        message = text.partition(" (parameter=")[0]
        return SteeringValidationError(message, parameter="vectors")
    return SteeringChangeError(text) if text else error
