# SPDX-License-Identifier: Apache-2.0
"""Environment variables of another capture system, which add a consumer here."""

import os
from collections.abc import Mapping
from typing import Any

SWITCH = "VLLM_ACT_CAPTURE"


def consumers_of_variables(
    environment: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """The consumers that the variables ask for, in the form of `capture_consumers`.

    Raises:
        CaptureValidationError: a variable is invalid; names it, its value and the
            remedy.

    """
    if environment.get(SWITCH, "") in ("", "0"):
        return []
    from vllm.interop.activation_capture.variables import consumer_of

    consumer = consumer_of(environment)
    return [] if consumer is None else [consumer]
