# SPDX-License-Identifier: Apache-2.0
"""Environment variables of other capture systems, refused if set."""

import os
from collections.abc import Mapping

from vllm.v1.capture.errors import CaptureValidationError

FOREIGN_VARIABLES = {
    "VLLM_ACT_CAPTURE": "start the server with --capture-consumers filesystem:root=DIR "
    "and send capture: {...} with a request, or name what every request captures in "
    "the consumer's global_hooks",
}
"""Environment variables that enable capture in another system; the remedy for each."""


def refuse_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to start if a variable of another capture system is set.

    Otherwise its user would get no captures and no message.

    Raises:
        CaptureValidationError: one is set; the message names it and the remedy.

    """
    for name, remedy in FOREIGN_VARIABLES.items():
        if environment.get(name, "") not in ("", "0"):
            raise CaptureValidationError(
                f"{name} is set, which nothing here reads; {remedy}, and unset it",
                parameter=name,
                value=environment[name][:60],
            )
