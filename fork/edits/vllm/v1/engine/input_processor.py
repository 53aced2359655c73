# SPDX-License-Identifier: Apache-2.0
"""Admission: capture and steering are checked before a request is scheduled."""

from fork.language import add_import, after, last

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refuse_args",
        why="Knows the keys.",
    ),
    add_import(
        "from vllm.v1.capture.frontend.disabled import NO_CAPTURE",
        why="The front end of capture, when there is none.",
    ),
    add_import(
        "from vllm.v1.steering.frontend.frontend import NO_STEERING_FRONTEND",
        why="The front end of steering, when there is none.",
    ),
    last(
        scope="InputProcessor.__init__",
        insert="self.capture = NO_CAPTURE\nself.steering = NO_STEERING_FRONTEND",
        why="The engine puts its own front ends here once it is up.",
    ),
    after(
        scope="InputProcessor.process_inputs",
        anchor="if sampling_params.trace_decode_token_ids:",
        insert="""
refuse_args(sampling_params.extra_args)
self.steering.admit(sampling_params, prompt_len, resumable)
self.capture.admit(request_id, sampling_params, prompt_len, resumable)
""",
        why="The prompt's length and max_tokens are final, and nothing is sent yet. A "
        "key that nobody reads is an error. Capture comes last, as it keeps names for "
        "what it admits.",
    ),
]
