# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters specify capture, readouts and steering of a request."""

from fork.language import add_argument, add_field, add_import, add_parameter, first
from fork.request_fields import NAMES, PARAMETERS

EDITS = [
    add_import(
        "from vllm.v1.residual.core.messages import "
        "CapturePlan, HookPlan, SteeringTiers",
        why="The types of what admission makes of the fields.",
    ),
    add_import(
        "from vllm.v1.capture.errors import check_form",
        why="Checks a field when the parameters are made.",
    ),
    first(
        scope="SamplingParams._verify_args",
        insert="check_form(self.capture)",
        why="A script's mistake is reported where it is made.",
    ),
    add_field(
        scope="SamplingParams",
        after="extra_args",
        insert='''
capture: dict[str, Any] | None = None
"""What to capture: name of the consumer instance -> capture spec."""
capture_wait: bool = False
"""Whether the final output waits for the results of its capture. Offline
generation always waits."""
capture_stream: bool = True
"""Whether outputs before the last carry captured rows as they are computed. Applies to
streamed outputs (`AsyncLLM`) and consumers that return rows with them."""
_capture_plan: CapturePlan | None = None
readouts: dict[str, Any] | None = None
"""Readouts, computed from rows on the device: name -> readout. Needs
`enable_readouts`."""
stop_when: list[dict[str, Any]] | None = None
"""Conditions on readouts that end the request at the token where they hold."""
steering_vectors: dict[str, Any] | None = None
"""Vectors to add at every token: hook point -> layer -> vector."""
prefill_steering_vectors: dict[str, Any] | None = None
"""Further vectors to add at prompt tokens."""
decode_steering_vectors: dict[str, Any] | None = None
"""Further vectors to add at generated tokens."""
steering_name: Any = None
"""Registered sets of vectors to add: a name, `{"name", "scale"}`, or a list of them."""
steering_module_ref: Any = None
"""One more registered set, as `(name, scale)`."""
steering_clamps: dict[str, Any] | None = None
"""Clamps at every token: hook point -> layer -> list of clamps."""
prefill_steering_clamps: dict[str, Any] | None = None
"""Further clamps at prompt tokens."""
decode_steering_clamps: dict[str, Any] | None = None
"""Further clamps at generated tokens."""
steering: list[dict[str, Any]] | None = None
"""Gates at generated tokens: when, scope and apply, as an earlier fork has them."""
patch: list[dict[str, Any]] | None = None
"""Rows to replace by those of a kept run: layer, hook, dest_position and a source."""
patch_vectors: dict[str, Any] | None = None
"""Packed rows that entries of `patch` name by their index."""
steering_receipt: bool = False
"""Whether the output says what steering has done to the request's tokens."""
conversation_id: str | None = None
"""Names the conversation that the request belongs to."""
_steering: SteeringTiers | None = None
_hooks: HookPlan | None = None
''',
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
