# SPDX-License-Identifier: Apache-2.0
"""Sessions whose prompt comes in parts: they cannot be captured.

The positions of a prompt that has no end yet are not known, and a captured request
ends once for its client, not with each part.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.capture.selectors import fail


def refuse(capture: Any, everyone: Sequence[str]) -> None:
    """Refuse a session that would be captured.

    Args:
        capture: what the session asks for, if anything.
        everyone: instances that capture every request.

    Raises:
        CaptureValidationError: one of both would capture it.

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
