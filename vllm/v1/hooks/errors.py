# SPDX-License-Identifier: Apache-2.0
"""Client errors for hook functions (HTTP 400)."""

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import failing


class HookError(VLLMValidationError, ValueError):
    """A request's hooks are invalid, or one of them has failed.

    The message names the parameter, the value and the remedy. Also a `ValueError`,
    which offline users catch.
    """


fail = failing(HookError)
"""`fail(message, parameter, value)` makes such an error."""
