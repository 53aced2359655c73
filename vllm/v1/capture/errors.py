# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong about capture, as upstream's client errors (HTTP 400)."""

from vllm.exceptions import VLLMValidationError


class CaptureValidationError(VLLMValidationError, ValueError):
    """A capture request that cannot be carried out as it stands.

    The message names the parameter, the value and the remedy. It is a
    `ValueError` too, which is what offline users catch.
    """


class UnknownCaptureConsumerError(CaptureValidationError):
    """A consumer name that this server does not have."""
