# SPDX-License-Identifier: Apache-2.0
"""Variables by which other systems capture: refused where they are set."""

import os
from collections.abc import Mapping

from vllm.v1.capture.errors import CaptureValidationError

FOREIGN_VARIABLES = {
    "VLLM_ACT_CAPTURE": "start the server with --capture-consumers filesystem:root=DIR "
    "and send capture: {...} with a request, or name what every request captures in "
    "the consumer's global_hooks",
}
"""Environment variables that make another system capture."""


def refuse_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to start where a variable asks another system to capture.

    Raises:
        CaptureValidationError: names the variable.

    """
    for name, remedy in FOREIGN_VARIABLES.items():
        if environment.get(name, "") not in ("", "0"):
            raise CaptureValidationError(
                f"{name} is set, which nothing here reads; {remedy}, and unset it",
                parameter=name,
                value=environment[name][:60],
            )
