# SPDX-License-Identifier: Apache-2.0
"""A final output carries the results of the request's capture."""

from fork.language import add_field, add_import, add_parameter, after, last

EDITS = [
    add_import(
        "from vllm.interop.vllm_lens import responses as lens_responses",
        why="Rows under the attribute that vllm-lens uses.",
    ),
    last(
        scope="RequestOutput",
        insert="activations = property(lens_responses.activations_of)",
        why="Scripts for vllm-lens read it.",
    ),
    add_import(
        "from vllm.v1.readouts.results import ReadoutResult, merge_results",
        why="The type of the field, and the function that merges results of outputs.",
    ),
    add_field(
        scope="CompletionOutput",
        after="weight_versions",
        insert="""
readouts: dict[str, ReadoutResult] | None = None
steering: dict[str, Any] | None = None
""",
        why="Each sample has its own results.",
    ),
    after(
        scope="RequestOutput.add",
        anchor="completion.text += next_completion.text",
        insert="""
completion.readouts = merge_results(
    completion.readouts, next_completion.readouts, next_completion.finished()
)
completion.steering = next_completion.steering or completion.steering
""",
        why="Merged outputs keep the results of both.",
    ),
    last(
        scope="RequestOutput",
        insert="""
@property
def readouts(self) -> dict[str, ReadoutResult]:
    \"\"\"Readout results of the first sample, by name.\"\"\"
    return (self.outputs[0].readouts or {}) if self.outputs else {}

@property
def steering(self) -> dict[str, Any] | None:
    \"\"\"What steering did to the first sample, if a receipt was requested.\"\"\"
    return self.outputs[0].steering if self.outputs else None
""",
        why="Most requests have one sample.",
    ),
    add_parameter(
        scope="RequestOutput.__init__",
        parameter="capture_id: str | None = None",
        after="ec_transfer_params",
        why="Identifies the captured request whose results belong to this output.",
    ),
    add_parameter(
        scope="RequestOutput.__init__",
        parameter="hooks_key: str | None = None",
        after="ec_transfer_params",
        why="Names what the request's hook functions have saved.",
    ),
    last(
        scope="RequestOutput.__init__",
        insert=(
            "self.hooks_key = hooks_key\n"
            "self.hook_results: dict[str, Any] | None = None\n"
            "self.hook_rows: Any = None\n"
            "self.capture_id = capture_id\n"
            "self.capture_results: dict[str, Any] | None = None\n"
            "self.lens_result: Any = None"
        ),
        why="Results are set when they are known.",
    ),
    last(
        scope="RequestOutput.add",
        insert="self.capture_id = next_output.capture_id or self.capture_id",
        why="Merged outputs keep the id, which comes with the last one.",
    ),
]
