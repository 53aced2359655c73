# SPDX-License-Identifier: Apache-2.0
"""Client errors for hook functions (HTTP 400)."""

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import cut, shown


class HookError(VLLMValidationError, ValueError):
    """A request's hooks are invalid, or one of them has failed.

    The message names the parameter, the value and the remedy. Also a `ValueError`,
    which offline users catch.
    """


def fail(message: str, parameter: str, value: Any) -> HookError:
    """The error for `parameter`; long values are shortened in the message."""
    return HookError(cut(message), parameter=cut(parameter), value=shown(value))
