# SPDX-License-Identifier: Apache-2.0
"""A final output carries the results of the request's capture."""

from fork.language import add_field, add_import, add_parameter, after, last

EDITS = [
    add_import(
        "from vllm.v1.readouts.results import ReadoutResult, merge_results",
        why="The type of the field, and how outputs that are merged keep theirs.",
    ),
    add_field(
        scope="CompletionOutput",
        after="weight_versions",
        insert="readouts: dict[str, ReadoutResult] | None = None",
        why="Each sample has its own.",
    ),
    after(
        scope="RequestOutput.add",
        anchor="completion.text += next_completion.text",
        insert="""
completion.readouts = merge_results(
    completion.readouts, next_completion.readouts, next_completion.finished()
)
""",
        why="Outputs that are merged keep the results of both.",
    ),
    last(
        scope="RequestOutput",
        insert="""
@property
def readouts(self) -> dict[str, ReadoutResult]:
    \"\"\"What was read out, by name; of the first sample, where there are more.\"\"\"
    return (self.outputs[0].readouts or {}) if self.outputs else {}
""",
        why="Most requests have one sample.",
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
            "self.capture_results: dict[str, Any] | None = None"
        ),
        why="Results are put in once they are known.",
    ),
    last(
        scope="RequestOutput.add",
        insert="self.capture_id = next_output.capture_id or self.capture_id",
        why="Outputs that are merged keep the id, which comes with the last one.",
    ),
]
