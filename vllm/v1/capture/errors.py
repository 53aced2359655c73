# SPDX-License-Identifier: Apache-2.0
"""Errors in capture requests, as subclasses of upstream's client error (HTTP 400)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.bounds import cut, shown

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class CaptureValidationError(VLLMValidationError, ValueError):
    """A capture request or configuration that is invalid.

    The message names the parameter, the value and the remedy. It is also a
    `ValueError`, which offline callers catch.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: Any = None
    ) -> None:
        """Shorten long texts: a client may have sent megabytes.

        Args:
            message: what is wrong and what to do about it.
            parameter: the name of the invalid parameter.
            value: its value; converted to text unless it is a number.

        """
        if value is not None and not isinstance(value, (int, float)):
            value = value if isinstance(value, str) else shown(value)
            value = value if len(value) <= 120 else value[:117] + "..."
        name = None if parameter is None else cut(parameter)
        super().__init__(cut(message), parameter=name, value=value)


class UnknownCaptureConsumerError(CaptureValidationError):
    """A consumer name that is not installed or not configured on this server."""


def fail(message: str, parameter: str, value: Any) -> CaptureValidationError:
    """The error for `parameter`, with long values shortened; the caller raises it."""
    return CaptureValidationError(message, parameter=parameter, value=shown(value))


def check_form(capture: Any) -> None:
    """Refuse what does not map consumers to specs, as `SamplingParams` is made.

    Raises:
        CaptureValidationError: names the parameter, the value and the remedy.

    """
    if capture is not None and not isinstance(capture, Mapping):
        raise fail(
            "capture must map consumers to what they capture, for example "
            '{"filesystem": {"hooks": {"post_block": [0]}}}',
            "capture",
            capture,
        )


def check_fields(params: "SamplingParams") -> None:
    """Refuse flags that are not true or false: the engine core could not read them.

    An empty `capture` asks for nothing, and becomes None.

    Raises:
        CaptureValidationError: names the parameter, the value and the remedy.

    """
    for name in ("capture_wait", "capture_stream", "capture_cache"):
        value = getattr(params, name)
        if not isinstance(value, bool):
            raise fail(f"{name} must be true or false", name, value)
    if isinstance(params.capture, Mapping) and not params.capture:
        params.capture = None
