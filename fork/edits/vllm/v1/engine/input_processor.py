# SPDX-License-Identifier: Apache-2.0
"""Admission: capture and steering are checked before a request is scheduled."""

from fork.language import add_import, after, first

EDITS = [
    add_import(
        """
from vllm.entrypoints.serve.utils.residual_fields import refuse_args
from vllm.interop.vllm_lens import requests as lens_requests
from vllm.v1.residual.frontend.front_end import NO_FRONT_END
""",
        why="Reject unknown keys, translate those of vllm-lens, and admit requests.",
    ),
    first(
        scope="InputProcessor",
        insert="residual = NO_FRONT_END",
        why="The engine replaces it by its own front end when it has started.",
    ),
    after(
        scope="InputProcessor.process_inputs",
        anchor="if sampling_params.trace_decode_token_ids:",
        insert="""
refuse_args(sampling_params.extra_args)
self.residual.hooks.admit(request_id, sampling_params)
lens_requests.translate(sampling_params, self.vllm_config)
self.residual.admit(request_id, sampling_params, prompt_len, resumable)
""",
        why="The prompt's length and max_tokens are final, and nothing has been sent "
        "yet. An unknown key is an error.",
    ),
]
