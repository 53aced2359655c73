# SPDX-License-Identifier: Apache-2.0
"""Admission: capture and steering are checked before a request is scheduled."""

from fork.language import add_import, after, last

EDITS = [
    add_import(
        "from vllm.interop.vllm_lens import requests as lens_requests",
        why="Requests in the format of vllm-lens.",
    ),
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refuse_args",
        why="Rejects unsupported keys.",
    ),
    add_import(
        "from vllm.v1.capture.frontend.disabled import NO_CAPTURE",
        why="The null object for capture.",
    ),
    add_import(
        "from vllm.v1.hooks.frontend.frontend import NO_HOOKS",
        why="The null object for hook functions.",
    ),
    add_import(
        "from vllm.v1.steering.frontend.frontend import NO_STEERING_FRONTEND",
        why="The null object for steering.",
    ),
    last(
        scope="InputProcessor.__init__",
        insert="""
self.capture = NO_CAPTURE
self.hooks = NO_HOOKS
self.steering = NO_STEERING_FRONTEND
""",
        why="The engine replaces these by its own front ends when it has started.",
    ),
    after(
        scope="InputProcessor.process_inputs",
        anchor="if sampling_params.trace_decode_token_ids:",
        insert="""
refuse_args(sampling_params.extra_args)
self.hooks.admit(request_id, sampling_params)
lens_requests.translate(sampling_params, self.vllm_config)
self.steering.admit(sampling_params, prompt_len, resumable)
self.capture.admit(request_id, sampling_params, prompt_len, resumable)
""",
        why="The prompt's length and max_tokens are final, and nothing has been sent "
        "yet. An unknown key is an error. Capture comes last, as it reserves names "
        "for admitted requests.",
    ),
]
