# SPDX-License-Identifier: Apache-2.0
"""The fields of requests and responses, which several edit files share."""

REQUEST = """
capture: dict[str, Any] | None = Field(
    default=None,
    description="What to capture of the request, per capture consumer.",
)
capture_wait: bool = Field(
    default=False,
    strict=True,
    description="Whether the response waits for the results of the capture.",
)
capture_stream: bool = Field(
    default=False,
    strict=True,
    description="Whether chunks of a stream carry captured rows for their tokens.",
)
readouts: dict[str, Any] | None = Field(
    default=None,
    description="Readouts, computed from rows on the device: name -> readout.",
)
stop_when: list[dict[str, Any]] | dict[str, Any] | None = Field(
    default=None,
    description="Conditions on readouts that end the request at their token.",
)
steering_vectors: dict[str, Any] | None = Field(
    default=None,
    description="Vectors that are added at every token: hook point -> layer -> vector.",
)
prefill_steering_vectors: dict[str, Any] | None = Field(
    default=None,
    description="Further vectors that are added at prompt tokens.",
)
decode_steering_vectors: dict[str, Any] | None = Field(
    default=None,
    description="Further vectors that are added at generated tokens.",
)
steering_name: str | dict[str, Any] | list[str | dict[str, Any]] | None = Field(
    default=None,
    description="Registered sets of vectors that are added: a name, an object with "
    "name and scale, or a list of these.",
)
steering_module_ref: list[Any] | None = Field(
    default=None,
    description="One more registered set, as [name, scale].",
)
steering_clamps: dict[str, Any] | None = Field(
    default=None,
    description="Clamps at every token: hook point -> layer -> list of clamps.",
)
prefill_steering_clamps: dict[str, Any] | None = Field(
    default=None,
    description="Further clamps at prompt tokens.",
)
decode_steering_clamps: dict[str, Any] | None = Field(
    default=None,
    description="Further clamps at generated tokens.",
)
steering: list[dict[str, Any]] | None = Field(
    default=None,
    description="Gates at generated tokens: objects with when, scope and apply.",
)
patch: list[dict[str, Any]] | None = Field(
    default=None,
    description="Rows that are replaced by those of a kept run, one for each object.",
)
patch_vectors: dict[str, Any] | None = Field(
    default=None,
    description="Packed rows that the objects of patch name by their index.",
)
steering_receipt: bool = Field(
    default=False,
    strict=True,
    description="Whether the response says what steering has done.",
)
conversation_id: str | None = Field(
    default=None,
    min_length=1,
    max_length=256,
    description="Names the conversation that the request belongs to.",
)
"""
"""The fields of completion and chat requests."""

RESULTS = """
capture_results: dict[str, Any] | None = Field(
    default=None, description="Results of the capture, per capture consumer."
)
readouts: dict[str, Any] | None = Field(
    default=None, description="Results of the readouts, by name."
)
steering: dict[str, Any] | None = Field(
    default=None, description="What steering has done to the request's tokens."
)
"""
"""The fields of the last chunk of a stream, and of responses."""

RESPONSE = f"""
activations: dict[str, Any] | None = Field(
    default=None,
    exclude_if=lambda value: value is None,  # vllm-lens' client tests for the key.
    description="Rows in the format of vllm-lens, if requested.",
)
hook_results: dict[str, Any] | None = Field(
    default=None,
    exclude_if=lambda value: value is None,
    description="What the request's hook functions saved, by hook.",
)
{RESULTS.lstrip()}"""
"""The fields of whole responses, with results in the formats of other libraries."""

PARAMETERS = (
    "capture: dict[str, Any] | None = None",
    "capture_wait: bool = False",
    "capture_stream: bool = False",
    "readouts: dict[str, Any] | None = None",
    "stop_when: list[dict[str, Any]] | None = None",
    "steering_vectors: dict[str, Any] | None = None",
    "prefill_steering_vectors: dict[str, Any] | None = None",
    "decode_steering_vectors: dict[str, Any] | None = None",
    "steering_name: Any = None",
    "steering_module_ref: Any = None",
    "steering_clamps: dict[str, Any] | None = None",
    "prefill_steering_clamps: dict[str, Any] | None = None",
    "decode_steering_clamps: dict[str, Any] | None = None",
    "steering: list[dict[str, Any]] | None = None",
    "patch: list[dict[str, Any]] | None = None",
    "patch_vectors: dict[str, Any] | None = None",
    "conversation_id: str | None = None",
    "steering_receipt: bool = False",
)
"""The fields of a request that its sampling parameters have, as Python parameters."""

NAMES = tuple(parameter.partition(":")[0] for parameter in PARAMETERS)
