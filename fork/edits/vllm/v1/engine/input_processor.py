# SPDX-License-Identifier: Apache-2.0
"""Admission: what a request wants captured is checked before it is scheduled."""

from fork.language import add_import, after, last

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend import NO_CAPTURE",
        why="The front end of capture, when there is none.",
    ),
    last(
        scope="InputProcessor.__init__",
        insert="self.capture = NO_CAPTURE",
        why="The engine puts its own front end here once it is up.",
    ),
    after(
        scope="InputProcessor.process_inputs",
        anchor="if sampling_params.trace_decode_token_ids:",
        insert="self.capture.admit(request_id, sampling_params, prompt_len, resumable)",
        why="The prompt's length and max_tokens are final, and nothing is sent yet.",
    ),
]
