# SPDX-License-Identifier: Apache-2.0
"""Client errors for readouts (HTTP 400)."""

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import failing


class ReadoutValidationError(VLLMValidationError, ValueError):
    """A request's readouts, or an option for them, are invalid.

    The message names the parameter, the value and the remedy. Also a `ValueError`,
    which offline users catch.
    """


fail = failing(ReadoutValidationError)
"""`fail(message, parameter, value)` makes such an error."""
