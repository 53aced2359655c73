# SPDX-License-Identifier: Apache-2.0
"""ChatCompletion requests carry a capture and steering; responses carry results."""

from fork.language import add_argument, add_field
from fork.request_fields import NAMES, REQUEST, RESPONSE, RESULTS

EDITS = [
    add_field(
        scope="ChatCompletionRequest",
        after="ec_transfer_params",
        insert=REQUEST,
        why="Clients request capture and steering per request.",
    ),
    add_field(
        scope="ChatCompletionResponse",
        after="ec_transfer_params",
        insert=RESPONSE,
        why="The response carries the results.",
    ),
    add_field(
        scope="ChatCompletionStreamResponse",
        after="model",
        insert=RESULTS,
        why="The last chunk of a stream carries the results.",
    ),
    add_field(
        scope="BatchChatCompletionRequest",
        after="return_token_ids",
        insert="\n".join(
            line
            for line in REQUEST.splitlines()
            if "steering_" in line.partition(":")[0]
        ),
        why="All conversations of a batch have the same steering.",
    ),
    *[
        add_argument(
            scope="ChatCompletionRequest.to_sampling_params",
            call="SamplingParams.from_optional",
            argument=f"{name}=self.{name}",
            why="Passes the field on.",
        )
        for name in NAMES
    ],
]
