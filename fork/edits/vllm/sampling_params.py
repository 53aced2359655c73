# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters specify capture, readouts and steering of a request."""

from fork.language import add_argument, add_field, add_import, add_parameter

EDITS = [
    add_import(
        "from vllm.v1.capture.plan import CapturePlan",
        why="The type of the field that carries the resolved plan.",
    ),
    add_import(
        "from vllm.v1.hooks.plan import HookPlan",
        why="The type of the field that carries the resolved functions.",
    ),
    add_import(
        "from vllm.v1.steering.plan import SteeringTiers",
        why="The type of the field that carries the resolved vectors.",
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
steering_receipt: bool = False
"""Whether the output says what steering has done to the request's tokens."""
conversation_id: str | None = None
"""Names the conversation that the request belongs to."""
_steering: SteeringTiers | None = None
_hooks: HookPlan | None = None
''',
        why="Capture is requested per request; admission resolves it to a plan.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="capture: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="capture_wait: bool = False",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="capture=capture",
        why="Passes the request's capture on.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="capture_wait=capture_wait",
        why="Passes the field on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="capture_stream: bool = False",
        why="HTTP streams carry rows before their last chunk only if requested.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="capture_stream=capture_stream",
        why="Passes the field on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="readouts: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="readouts=readouts",
        why="Passes the request's readouts on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="stop_when: list[dict[str, Any]] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="stop_when=stop_when",
        why="Passes the request's stop conditions on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering_vectors: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering_vectors=steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="prefill_steering_vectors: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="prefill_steering_vectors=prefill_steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="decode_steering_vectors: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="decode_steering_vectors=decode_steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering_name: Any = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering_name=steering_name",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering_module_ref: Any = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering_module_ref=steering_module_ref",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering_clamps: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering_clamps=steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="prefill_steering_clamps: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="prefill_steering_clamps=prefill_steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="decode_steering_clamps: dict[str, Any] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="decode_steering_clamps=decode_steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering: list[dict[str, Any]] | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering=steering",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="conversation_id: str | None = None",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="conversation_id=conversation_id",
        why="Passes the request's steering on.",
    ),
    add_parameter(
        scope="SamplingParams.from_optional",
        parameter="steering_receipt: bool = False",
        why="The HTTP requests build their parameters here.",
    ),
    add_argument(
        scope="SamplingParams.from_optional",
        call="SamplingParams",
        argument="steering_receipt=steering_receipt",
        why="Passes the field on.",
    ),
]
