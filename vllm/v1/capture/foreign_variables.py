# SPDX-License-Identifier: Apache-2.0
"""Variables of another system that make it capture: here they add a consumer."""

import os
from collections.abc import Mapping
from typing import Any

SWITCH = "VLLM_ACT_CAPTURE"


def consumers_of_variables(
    environment: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """Consumers that variables ask for, as `capture_consumers` takes them.

    Raises:
        CaptureValidationError: names the variable, its value and the remedy.

    """
    if environment.get(SWITCH, "") in ("", "0"):
        return []
    from vllm.interop.activation_capture.variables import consumer_of

    consumer = consumer_of(environment)
    return [] if consumer is None else [consumer]
