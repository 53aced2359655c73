# SPDX-License-Identifier: Apache-2.0
"""Refuses captures of sessions with streaming input, whose prompt comes in parts.

The length of such a prompt is unknown at admission, and a session ends several times
for its client, a captured request only once.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.capture.errors import fail


def refuse(capture: Any, everyone: Sequence[str]) -> None:
    """Refuse a session that would be captured.

    Args:
        capture: `SamplingParams.capture` of the session.
        everyone: names of the instances that capture every request.

    Raises:
        CaptureValidationError: `capture` is set or `everyone` is not empty.

    """
    if capture is not None:
        raise fail(
            "capture: a request with streaming input cannot be captured yet; send the "
            "whole prompt",
            "capture",
            capture,
        )
    if everyone:
        raise fail(
            f"capture: {list(everyone)} capture every request, and one with streaming "
            "input cannot be captured yet; send the whole prompt, or start the server "
            "without their global capture",
            "capture",
            list(everyone),
        )
