# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters specify capture, readouts and steering of a request."""

from fork.language import add_argument, add_field, add_import, add_parameter, first
from fork.request_fields import FIELDS, NAMES, PARAMETERS

EDITS = [
    add_import(
        """
from vllm.v1.capture.errors import check_form
from vllm.v1.residual.core.messages import CapturePlan, HookPlan, SteeringTiers
""",
        why="Checks a field; the types of what admission makes of the fields.",
    ),
    first(
        scope="SamplingParams._verify_args",
        insert="check_form(self.capture)",
        why="A script's mistake is reported where it is made.",
    ),
    add_field(
        scope="SamplingParams",
        after="extra_args",
        # Offline, whoever reads outputs one by one gets their rows with them.
        insert=FIELDS.replace("stream: bool = False", "stream: bool = True")
        + """
_capture_plan: CapturePlan | None = None
_steering: SteeringTiers | None = None
_hooks: HookPlan | None = None
""",
        why="Capture is requested per request; admission resolves it to a plan.",
    ),
    *[
        add_parameter(
            scope="SamplingParams.from_optional",
            parameter=parameter,
            why="The HTTP requests build their parameters here.",
        )
        for parameter in PARAMETERS
    ],
    *[
        add_argument(
            scope="SamplingParams.from_optional",
            call="SamplingParams",
            argument=f"{name}={name}",
            why="Passes the field on.",
        )
        for name in NAMES
    ],
]
