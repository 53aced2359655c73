# SPDX-License-Identifier: Apache-2.0
"""Completion requests carry a capture and steering; responses carry results."""

from fork.language import add_argument, add_field

EDITS = [
    add_field(
        scope="CompletionRequest",
        after="ec_transfer_params",
        insert="""
capture: dict[str, Any] | None = Field(
    default=None,
    description="What to capture of the request, per capture consumer.",
)
capture_wait: bool = Field(
    default=False,
    description="Whether the response waits for the results of the capture.",
)
capture_stream: bool = Field(
    default=False,
    description="Whether chunks of a stream carry captured rows for their tokens.",
)
readouts: dict[str, Any] | None = Field(
    default=None,
    description="Readouts, computed from rows on the device: name -> readout.",
)
stop_when: list[dict[str, Any]] | None = Field(
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
steering_receipt: bool = Field(
    default=False,
    description="Whether the response says what steering has done.",
)
conversation_id: str | None = Field(
    default=None,
    min_length=1,
    max_length=256,
    description="Names the conversation that the request belongs to.",
)
""",
        why="Clients request capture and steering per request.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="capture=self.capture",
        why="Passes the request's capture on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="capture_wait=self.capture_wait",
        why="Passes the field on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="capture_stream=self.capture_stream",
        why="Passes the field on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="readouts=self.readouts",
        why="Passes the field on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="stop_when=self.stop_when",
        why="Passes the field on.",
    ),
    add_field(
        scope="CompletionResponse",
        after="ec_transfer_params",
        insert="""
activations: dict[str, Any] | None = Field(
    default=None, description="Rows in the format of vllm-lens, if requested."
)
hook_results: dict[str, Any] | None = Field(
    default=None, description="What the request's hook functions saved, by hook."
)
capture_results: dict[str, Any] | None = Field(
    default=None, description="Results of the capture, per capture consumer."
)
readouts: dict[str, Any] | None = Field(
    default=None, description="Results of the readouts, by name."
)
steering: dict[str, Any] | None = Field(
    default=None, description="What steering has done to the request's tokens."
)
""",
        why="The response carries the results.",
    ),
    add_field(
        scope="CompletionStreamResponse",
        after="model",
        insert="""
capture_results: dict[str, Any] | None = Field(
    default=None, description="Results of the capture, per capture consumer."
)
readouts: dict[str, Any] | None = Field(
    default=None, description="Results of the readouts, by name."
)
steering: dict[str, Any] | None = Field(
    default=None, description="What steering has done to the request's tokens."
)
""",
        why="The last chunk of a stream carries the results.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering_vectors=self.steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="prefill_steering_vectors=self.prefill_steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="decode_steering_vectors=self.decode_steering_vectors",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering_name=self.steering_name",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering_module_ref=self.steering_module_ref",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering_clamps=self.steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="prefill_steering_clamps=self.prefill_steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="decode_steering_clamps=self.decode_steering_clamps",
        why="Passes the request's steering on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering=self.steering",
        why="Passes the field on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="conversation_id=self.conversation_id",
        why="Passes the field on.",
    ),
    add_argument(
        scope="CompletionRequest.to_sampling_params",
        call="SamplingParams.from_optional",
        argument="steering_receipt=self.steering_receipt",
        why="Passes the field on.",
    ),
]
