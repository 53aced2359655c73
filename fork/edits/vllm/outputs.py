# SPDX-License-Identifier: Apache-2.0
"""A final output carries the results of the request's capture."""

from fork.language import add_import, add_parameter, last

EDITS = [
    add_import(
        "from vllm.interop.vllm_lens import responses as lens_responses",
        why="Rows under the name that vllm-lens gives them.",
    ),
    last(
        scope="RequestOutput",
        insert="activations = property(lens_responses.activations_of)",
        why="Scripts for vllm-lens read it.",
    ),
    add_parameter(
        scope="RequestOutput.__init__",
        parameter="capture_id: str | None = None",
        after="ec_transfer_params",
        why="Names the captured request whose results belong to this output.",
    ),
    last(
        scope="RequestOutput.__init__",
        insert=(
            "self.capture_id = capture_id\n"
            "self.capture_results: dict[str, Any] | None = None\n"
            "self.lens_result: Any = None"
        ),
        why="Results are put in once they are known.",
    ),
    last(
        scope="RequestOutput.add",
        insert="self.capture_id = next_output.capture_id or self.capture_id",
        why="Outputs that are merged keep the id, which comes with the last one.",
    ),
]
